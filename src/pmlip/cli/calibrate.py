"""pmlip calibrate: scale the spread of a model to its errors on structures it was not trained on."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pmlip.cli.checks import check_new_file, chosen_device
from pmlip.cli.options import (
    AsJson,
    Device,
    EnergyKey,
    ForcesKey,
    Model,
    SettingsFile,
    StressKey,
    Trust,
    Weights,
    print_json,
)
from pmlip.cli.progress import counter, progress_bar
from pmlip.run_folder import model_file

if TYPE_CHECKING:
    from ase import Atoms

    from pmlip.methods.base import Method


def calibrate(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Structures with DFT forces that the model was not trained on.")],
    *,
    samples: Annotated[
        int, typer.Option(min=3, help="Samples K; give the number that you will use for predictions.")
    ] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    level: Annotated[
        float, typer.Option(help="Coverage of the conformal intervals; a higher level needs more structures.")
    ] = 0.95,
    settings_file: SettingsFile = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="File of the calibrated model. It must not exist yet.", rich_help_panel="Output")
    ] = Path("calibrated.pt"),
    as_json: AsJson = False,
) -> None:
    """Scale the spread of a model to its errors on held-out structures.

    Energy error bars have a second factor, fitted to the energy errors. The scale of novelty and its error bars are
    fitted to the same structures.

    Example: pmlip calibrate p-chgnet/model.pt valid.extxyz --out p-chgnet/calibrated.pt
    """
    from pmlip.loading import load
    from pmlip.structures.atoms import in_file
    from pmlip.structures.files import read_structures

    model = model_file(model)
    console = Console(quiet=as_json)
    check_new_file(out)
    loaded = load(model, weights=weights, trust=trust, device=chosen_device(device))
    structures, found = read_structures(data, energy_key=energy_key, forces_key=forces_key, stress_key=stress_key)
    console.print(str(found))
    with in_file(data):
        loaded.backbone.check(structures, range(len(structures)))
    record = calibrate_and_print(
        loaded, structures, data=data.name, samples=samples, seed=seed, level=level, console=console
    )
    if loaded.training_features:
        with progress_bar(console) as bar, in_file(data):
            loaded.rescale_novelty(structures, progress=counter(bar, "novelty"))
        for training in loaded.training_features.values():
            console.print(training.describe())
    loaded.save(out)
    console.print(f"the calibrated model was written to {out}")
    print_json(record, as_json)


def calibrate_and_print(
    trained: "Method",
    structures: "Sequence[Atoms]",
    *,
    data: str,
    samples: int = 16,
    seed: int = 0,
    level: float = 0.95,
    energies: bool = True,
    chunk_atoms: int | None = None,
    console: Console,
) -> dict[str, Any]:
    """Calibrate a model in place and print the result.

    energies: whether to fit a factor to the energies too. data: name of the structures, which the model keeps.
    """
    from pmlip import calibration

    with progress_bar(console) as bar:
        result = calibration.calibrate(
            trained,
            structures,
            samples=samples,
            seed=seed,
            level=level,
            energies=energies,
            data=data,
            chunk_atoms=chunk_atoms,
            progress=counter(bar, "calibrating"),
        )
    (before, after), (ratio_before, ratio_after) = result.crps, result.ssr
    console.print(
        f"The spread was multiplied by {result.factor:.2f}: SSR {ratio_before:.2f} -> {ratio_after:.2f}, CRPS of the "
        f"forces {1e3 * before:.1f} -> {1e3 * after:.1f} meV/Å on {result.structures} structures."
    )
    if result.energy_ssr is not None:
        ratio_before, ratio_after = result.energy_ssr
        console.print(
            f"Energy error bars have a second factor, {result.energy_factor:.2f}: SSR {ratio_before:.2f} -> "
            f"{ratio_after:.2f}. It does not change the samples."
        )
    elif energies:
        console.print(
            "Energy error bars have no second factor, because its fit needs at least "
            f"{calibration.FEWEST_ENERGIES} structures with energies."
        )
    if result.conformal is None:
        console.print(f"No conformal intervals: {result.withheld}.")
    else:
        console.print(
            f"With {result.samples} samples, a force component of a similar structure lies within mean ± "
            f"{result.conformal:.2f} sigma with a probability of at least {level:.0%} (conformal interval); sigma is "
            "the spread times sqrt(1 + 1/K)."
        )
    return asdict(result)
