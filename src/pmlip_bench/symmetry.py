"""Rotation error of samples: forces of a rotated structure against rotated forces, with the same noise."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from rich.console import Console

from pmlip.atomic_files import write_json
from pmlip.backbones import load_backbone
from pmlip.datasets import silica_pbe
from pmlip.loading import load
from pmlip.methods import Method
from pmlip.methods.p import Potential, perturb
from pmlip.provenance import environment
from pmlip.structures.rotation import random_rotation, rotated
from pmlip_bench.runner import slug

SAMPLES, ROTATIONS, SEED = 8, 4, 0
SPREAD = 0.1  # eV/Å, as for a typical fine-tuned model; random noise weights are scaled to this spread


def run(
    backbone: str, *, model: Path | None, weights: Path | None, trust: bool, out: Path, console: Console
) -> dict[str, Any]:
    """Measure the rotation error of a fine-tuned model, or of the backbone with random noise weights if model is None.

    Untrained noise weights are zero, so samples would all be equal to the prediction without noise.
    """
    structures = [atoms for atoms in silica_pbe("test") if atoms.info["polymorph"] == "quartz"][:8]
    original = load_backbone(backbone, weights=weights, trust=trust)
    sampled: Method = perturb(original) if model is None else load(model, backbone=original)
    if model is None:
        assert isinstance(sampled, Potential)
        _randomise(sampled, structures)
    record: dict[str, Any] = {
        "backbone": backbone,
        "fine_tuned": None if model is None else str(getattr(sampled, "name", "p")),
        "structures": f"{len(structures)} of alpha-quartz",
        "samples": SAMPLES,
        "rotations": ROTATIONS,
        "seed": SEED,
        **rotation_errors(sampled, structures),
        **environment(),
    }
    fine_tuned = "" if model is None else f"-fine-tuned-{record['fine_tuned']}"
    write_json(out / f"{slug(backbone)}{fine_tuned}.json", record)
    errors = record["rotation_error"]
    console.print(
        f"{backbone}: RMS rotation error of the forces {errors['samples']:.1e} eV/Å in a sample, "
        f"{errors['without_noise']:.1e} without noise; RMS force {record['force']:.2f}, spread {record['spread']:.2g}"
    )
    return record


def _randomise(model: Potential, structures: Sequence[Atoms]) -> None:
    """Set random noise weights that give the spread `SPREAD`."""
    size = 0.01
    for _ in range(3):  # iterate: the spread is only nearly proportional to the noise weights
        model.randomise(size, seed=SEED)
        spread = float(model.sample(structures, samples=SAMPLES).spread.forces.square().mean().sqrt())
        size *= SPREAD / spread
    model.randomise(size, seed=SEED)


def rotation_errors(model: Method, structures: Sequence[Atoms]) -> dict[str, Any]:
    """Root mean squares in eV/Å: rotation errors of the forces with and without noise, spread, and forces."""
    random, samples = np.random.default_rng(SEED), model.spread_samples(SAMPLES)
    expected, point = model.sample(structures, samples=samples), model.predict(structures)
    squares: dict[str, list[float]] = {"samples": [], "without_noise": []}
    for _ in range(ROTATIONS):
        matrix = random_rotation(random)
        rotated_structures = [rotated(atoms, matrix) for atoms in structures]
        transposed = torch.from_numpy(matrix).to(point.forces).T
        pairs = {
            "samples": (model.sample(rotated_structures, samples=samples).forces, expected.forces),
            "without_noise": (model.predict(rotated_structures).forces, point.forces),
        }
        for name, (given, original) in pairs.items():
            squares[name].append(float((given - original @ transposed).square().mean()))
    return {
        "rotation_error": {name: float(np.sqrt(np.mean(values))) for name, values in squares.items()},
        "spread": float(expected.spread.forces.square().mean().sqrt()),
        "force": float(point.forces.square().mean().sqrt()),
    }


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown table of the result files."""
    lines = ["| | in a sample | without noise | spread | forces |", "|---|---|---|---|---|"]
    for record in records:
        errors = record["rotation_error"]
        sizes = (errors["samples"], errors["without_noise"], record["spread"])
        cells = [*(f"{size:.1e} eV/Å" for size in sizes), f"{record['force']:.1f} eV/Å"]
        fine_tuned = f", fine-tuned by {record['fine_tuned']}" if record.get("fine_tuned") else ""
        lines.append(f"| {record['backbone']}{fine_tuned} | {' | '.join(cells)} |")
    return "\n".join(lines)
