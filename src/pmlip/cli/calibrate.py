"""pmlip calibrate: the spread of a model scaled by one factor, fitted on structures it was not trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ase import Atoms
from rich.console import Console

from pmlip.calibration import calibrate
from pmlip.cli.checks import check_new_file, chosen_device
from pmlip.cli.progress import counter, progress_bar
from pmlip.loading import load
from pmlip.methods.base import Method
from pmlip.spread_fit import LEVEL
from pmlip.structures.atoms import in_file
from pmlip.structures.files import read_structures


def run(
    path: Path,
    data: Path,
    *,
    out: Path,
    keys: Mapping[str, str | None],
    samples: int,
    seed: int,
    level: float,
    weights: Path | None,
    trust: bool,
    device: str | None,
    console: Console,
) -> dict[str, Any]:
    check_new_file(out)
    loaded = load(path, weights=weights, trust=trust, device=chosen_device(device))
    structures, found = read_structures(data, **keys)
    console.print(str(found))
    with in_file(data):
        loaded.backbone.check(structures, range(len(structures)))
    record = calibrate_and_say(
        loaded, structures, data=data.name, samples=samples, seed=seed, level=level, console=console
    )
    loaded.save(out)
    console.print(f"the scaled model is {out}")
    return record


def calibrate_and_say(
    trained: Method,
    structures: Sequence[Atoms],
    *,
    data: str,
    samples: int = 16,
    seed: int = 0,
    level: float = LEVEL,
    chunk_atoms: int | None = None,
    console: Console,
) -> dict[str, Any]:
    """Calibrate a model in place on the structures that `data` names, say what that gave, and put it on its record."""
    with progress_bar(console) as bar:
        result = calibrate(
            trained,
            structures,
            samples=samples,
            seed=seed,
            level=level,
            data=data,
            chunk_atoms=chunk_atoms,
            progress=counter(bar, "calibrating"),
        )
    (before, after), (ratio_before, ratio_after) = result.crps, result.ssr
    console.print(
        f"The spread was scaled by {result.factor:.2f}: SSR {ratio_before:.2f} -> {ratio_after:.2f}, CRPS of the "
        f"forces {1e3 * before:.1f} -> {1e3 * after:.1f} meV/Å on {result.structures} structures."
    )
    if result.conformal is None:
        console.print(f"Intervals of guaranteed {level:.0%} coverage need more than {result.structures} structures.")
    else:
        console.print(
            f"With {result.samples} samples, a force component of a structure like these lies within mean ± "
            f"{result.conformal:.2f} sigma with at least {level:.0%} probability (conformal); sigma is the spread "
            "times sqrt(1 + 1/K)."
        )
    return asdict(result)
