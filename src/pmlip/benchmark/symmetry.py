"""What symmetry a sample keeps: how far the forces of a turned structure are from the turned forces, at fixed noise."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pmlip.backbones import load_backbone
from pmlip.datasets import silica_pbe
from pmlip.files import write_json
from pmlip.model import perturb
from pmlip.record import environment, slug
from pmlip.rotation import random_rotation, rotated

SAMPLES, ROTATIONS, SEED = 8, 4, 0
SPREAD = 0.1  # eV/Å, about that of a fine-tuned model; the random noise weights are scaled to give it


def run(backbone: str, *, weights: Path | None, trust: bool, out: Path, console: Console) -> dict[str, Any]:
    """Measure it with random noise weights, since at zero ones there is nothing to see."""
    structures = [atoms for atoms in silica_pbe("test") if atoms.info["polymorph"] == "quartz"][:8]
    model = perturb(load_backbone(backbone, weights=weights, trust=trust))
    size = 0.01
    for _ in range(3):  # a spread is nearly, not wholly, proportional to the noise weights
        model.randomise(size, seed=SEED)
        spread = float(model.sample(structures, samples=SAMPLES).spread.forces.square().mean().sqrt())
        size *= SPREAD / spread
    model.randomise(size, seed=SEED)
    random = np.random.default_rng(SEED)
    expected, point = model.sample(structures, samples=SAMPLES), model.predict(structures)
    squares: dict[str, list[float]] = {"samples": [], "without_noise": []}
    for _ in range(ROTATIONS):
        matrix = random_rotation(random)
        turned = [rotated(atoms, matrix) for atoms in structures]
        transposed = torch.from_numpy(matrix).to(point.forces).T
        pairs = {
            "samples": (model.sample(turned, samples=SAMPLES).forces, expected.forces),
            "without_noise": (model.predict(turned).forces, point.forces),
        }
        for name, (given, original) in pairs.items():
            squares[name].append(float((given - original @ transposed).square().mean()))
    record: dict[str, Any] = {
        "backbone": backbone,
        "structures": f"{len(structures)} of alpha-quartz",
        "samples": SAMPLES,
        "rotations": ROTATIONS,
        "seed": SEED,
        "rotation_error": {name: float(np.sqrt(np.mean(values))) for name, values in squares.items()},
        "spread": float(expected.spread.forces.square().mean().sqrt()),
        "force": float(point.forces.square().mean().sqrt()),
        **environment(),
    }
    write_json(out / f"{slug(backbone)}.json", record)
    errors = record["rotation_error"]
    console.print(
        f"{backbone}: root mean square error of turned forces {errors['samples']:.1e} eV/Å in a sample, "
        f"{errors['without_noise']:.1e} without noise; forces {record['force']:.2f}, spread {record['spread']:.2g}"
    )
    return record


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of the result files."""
    lines = ["| | in a sample | without noise | forces |", "|---|---|---|---|"]
    for record in records:
        errors = record["rotation_error"]
        cells = (f"{errors['samples']:.1e} eV/Å", f"{errors['without_noise']:.1e} eV/Å", f"{record['force']:.1f} eV/Å")
        lines.append(f"| {record['backbone']} | {' | '.join(cells)} |")
    return "\n".join(lines)
