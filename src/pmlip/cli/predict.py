"""pmlip predict: a copy of a file of structures, with predictions and uncertainties."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pmlip.cli.checks import check_new_file, chosen_device
from pmlip.cli.options import AsJson, Device, Model, SettingsFile, Trust, Weights, print_json
from pmlip.cli.progress import counter, printed_warnings, progress_bar, resumable
from pmlip.run_folder import model_file


def predict(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Structures: extxyz, ase.db, npz or any other format ASE reads.")],
    *,
    samples: Annotated[
        int,
        typer.Option(
            min=0,
            help="Samples K per structure; more give a more precise spread and cost more time. 0: one pass, with error "
            "bars from novelty.",
        ),
    ] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    settings_file: SettingsFile = None,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = None,
    out: Annotated[
        Path,
        typer.Option(
            help="extxyz file to write, with predictions and uncertainties. It must not exist yet.",
            rich_help_panel="Output",
        ),
    ] = Path("predictions.extxyz"),
    as_json: AsJson = False,
) -> None:
    """Predict energy, forces and stress of structures, with uncertainties.

    The file of structures may be larger than the memory. To continue after an interruption, run the same command again.

    Example: pmlip predict p-chgnet/model.pt structures.extxyz --samples 16 --out predictions.extxyz
    """
    from pmlip.loading import load
    from pmlip.prediction import predict_file

    model = model_file(model)
    console = Console(quiet=as_json)
    check_new_file(out)
    loaded = load(model, weights=weights, trust=trust, device=chosen_device(device))
    identity = hashlib.sha256(model.read_bytes()).hexdigest()
    with progress_bar(console) as bar, resumable(console), printed_warnings(console, data):
        count = predict_file(
            loaded, data, out, samples=samples, seed=seed, identity=identity, progress=counter(bar, data.name)
        )
    console.print(f"{count} structures with predictions and uncertainties were written to {out}")
    used = samples and (loaded.fixed_samples or samples)
    print_json({"structures": count, "out": str(out), "samples": used, "seed": seed}, as_json)
