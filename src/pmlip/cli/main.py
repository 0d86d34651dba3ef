"""The commands of daily use."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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
    exit_on_error,
    options_of,
    print_json,
)
from pmlip.memory import keep_freed_memory
from pmlip.training.config import FinetuneConfig
from pmlip_bench.cli import bench

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


@app.callback()
def begin() -> None:
    """Makes machine-learning interatomic potentials tell how sure they are."""
    keep_freed_memory()


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the report, pictures and model; an interrupted demo goes on from it.")
    ] = Path("pmlip-demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps, about.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Fine-tune P-CHGNet on the silica set that ships with pmlip; show its spread beside its error.

    Example: pmlip demo --steps 100
    """
    from pmlip.cli.demo import run

    with exit_on_error():
        record = run(out, steps=steps, seed=seed, console=Console(quiet=as_json))
    print_json(record, as_json)


@app.command()
@options_of(FinetuneConfig)
def finetune(
    train: Annotated[Path, typer.Argument(help="Structures with DFT labels: extxyz, ase.db, npz.")],
    backbone: Annotated[str, typer.Option(help="chgnet, orb:orb_v3_direct_20_omat, sevenn:7net-0, mace.")] = "chgnet",
    *,
    weights: Weights = None,
    trust: Trust = False,
    valid: Annotated[Path | None, typer.Option(help="Validation structures; by default a tenth of TRAIN.")] = None,
    method: Annotated[
        str,
        typer.Option(help="p, p-ensemble, or a rival: deterministic, ensemble, blip, mc-dropout, ..."),
    ] = "p",
    option: Annotated[list[str] | None, typer.Option(help="Option of the method, as members=5; repeatable.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Train on so many structures, chosen by the seed.")] = None,
    calibrate: Annotated[bool, typer.Option(help="Scale the spread to the validation structures at the end.")] = True,
    out: Annotated[Path, typer.Option(help="Folder of the model and the state of the run.")] = Path("pmlip-model"),
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    device: Device = None,
    tensorboard: Annotated[bool, typer.Option(help="Write curves for TensorBoard to OUT/tensorboard.")] = False,
    settings_file: SettingsFile = None,
    as_json: AsJson = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print all settings as TOML and the time of a step; train nothing.")
    ] = False,
    **settings: Any,
) -> None:
    """Fine-tune a pretrained potential on your DFT data, so that it tells how sure it is.

    Run the same command again to go on after an interruption. On several processes: torchrun --nproc-per-node 2 -m
    pmlip finetune ...

    Example: pmlip finetune silica.extxyz --backbone chgnet --epochs 20 --out p-chgnet
    """
    from pmlip.cli.finetune import run

    with exit_on_error():
        keys = {"energy_key": energy_key, "forces_key": forces_key, "stress_key": stress_key}
        record = run(
            train,
            valid,
            keys=keys,
            count=count,
            calibrated=calibrate,
            backbone=backbone,
            weights=weights,
            trust=trust,
            method=method,
            options=_options(option or []),
            config=FinetuneConfig(**settings),
            out=out,
            device=device,
            tensorboard=tensorboard,
            dry_run=dry_run,
            quiet=as_json,
        )
    print_json(record, as_json and bool(record))


def _options(pairs: list[str]) -> dict[str, float | int]:
    options: dict[str, float | int] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            options[name.replace("-", "_")] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"an option of a method is written name=number, got {pair!r}")
    return options


@app.command()
def evaluate(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Structures with DFT labels that it was not trained on.")],
    *,
    unseen: Annotated[list[Path] | None, typer.Option(help="Out-of-distribution structures; repeatable.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples K.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples, and of --count.")] = 0,
    count: Annotated[int | None, typer.Option(min=1, help="Take so many structures of each file by chance.")] = None,
    exclude: Annotated[Path | None, typer.Option(help="Folder of a run; what it has seen is left out.")] = None,
    compare: Annotated[list[Path] | None, typer.Option(help="Another model, side by side; repeatable.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report to this HTML file.")] = None,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    out: Annotated[Path | None, typer.Option(help="Write the scores to this JSON file.")] = None,
    settings_file: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Score a model and its uncertainty on structures with labels.

    Example: pmlip evaluate p-chgnet/model.pt test.extxyz --samples 32 --report report.html
    """
    from pmlip.cli.evaluate import run

    with exit_on_error():
        record = run(
            model,
            data,
            unseen or [],
            others=compare or [],
            keys={"energy_key": energy_key, "forces_key": forces_key, "stress_key": stress_key},
            samples=samples,
            seed=seed,
            count=count,
            exclude=exclude,
            weights=weights,
            trust=trust,
            device=device,
            out=out,
            report=report,
            console=Console(quiet=as_json),
        )
    print_json(record, as_json)


@app.command()
def predict(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Structures: extxyz, ase.db, npz or what else ASE reads.")],
    *,
    out: Annotated[Path, typer.Option(help="Annotated extxyz file to write.")] = Path("predictions.extxyz"),
    samples: Annotated[int, typer.Option(min=2, help="Samples K.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = None,
    settings_file: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Predict energy, forces and stress of structures, with their uncertainties.

    The file may be larger than memory. Run the same command again to go on after an interruption.

    Example: pmlip predict p-chgnet/model.pt structures.extxyz --samples 16 --out predictions.extxyz
    """
    from pmlip.cli.predict import run

    with exit_on_error():
        console = Console(quiet=as_json)
        record = run(
            model,
            data,
            out=out,
            samples=samples,
            seed=seed,
            weights=weights,
            trust=trust,
            device=device,
            console=console,
        )
    print_json(record, as_json)


@app.command()
def calibrate(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Structures with DFT forces that it was not trained on.")],
    *,
    out: Annotated[Path, typer.Option(help="File of the scaled model.")] = Path("calibrated.pt"),
    samples: Annotated[int, typer.Option(min=3, help="Samples K, as many as will be taken later.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    level: Annotated[float, typer.Option(help="Probability of the conformal intervals.")] = 0.95,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    settings_file: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Scale the spread of a model by one factor, so that it fits the errors on these structures.

    Example: pmlip calibrate p-chgnet/model.pt valid.extxyz --out p-chgnet/calibrated.pt
    """
    from pmlip.cli.calibrate import run

    with exit_on_error():
        record = run(
            model,
            data,
            out=out,
            keys={"energy_key": energy_key, "forces_key": forces_key, "stress_key": stress_key},
            samples=samples,
            seed=seed,
            level=level,
            weights=weights,
            trust=trust,
            device=device,
            console=Console(quiet=as_json),
        )
    print_json(record, as_json)


@app.command()
def fold(
    model: Model,
    *,
    out: Annotated[Path, typer.Option(help="File to write, in the format of the potential's own package.")],
    sample: Annotated[int, typer.Option(min=0, help="Number of the sample.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    weights: Weights = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write one sample as an ordinary file of the potential's own package.

    A sample of CHGNet or Orb then needs no pmlip; one of MACE does, and SevenNet's format cannot hold one.

    Example: pmlip fold p-chgnet/model.pt --sample 3 --out sample-3.pth.tar
    """
    from pmlip.cli.fold import run

    with exit_on_error():
        console = Console(quiet=as_json)
        record = run(model, out=out, sample=sample, seed=seed, weights=weights, trust=trust, console=console)
    print_json(record, as_json)


@app.command()
def info(model: Model, as_json: AsJson = False) -> None:
    """Tell what a file of a model is: its backbone, data, settings, scores and versions.

    Example: pmlip info p-chgnet/model.pt
    """
    from pmlip.cli.info import run

    with exit_on_error():
        record = run(model, console=Console(quiet=as_json))
    print_json(record, as_json)
