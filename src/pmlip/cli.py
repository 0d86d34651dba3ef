"""The command line: parse, call, print."""

import contextlib
import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pmlip.benchmark.runner import CellError
from pmlip.hints import did_you_mean
from pmlip.training import FinetuneConfig

app = typer.Typer(
    no_args_is_help=True,
    help="Makes machine-learning interatomic potentials tell how sure they are.",
    pretty_exceptions_enable=False,
)
bench = typer.Typer(no_args_is_help=True, help="Benchmarks; each writes result files.")
app.add_typer(bench, name="bench")

FAILED, BAD_INPUT = 1, 2

Model = Annotated[Path, typer.Argument(help="A model that finetune wrote.")]
Weights = Annotated[Path | None, typer.Option(help="Local file of the backbone's weights.")]
Trust = Annotated[bool, typer.Option(help="Load weights that are a pickle, which can execute code.")]
EnergyKey = Annotated[str | None, typer.Option(help="Name of the energies; found by itself if common.")]
ForcesKey = Annotated[str | None, typer.Option(help="Name of the forces.")]
StressKey = Annotated[str | None, typer.Option(help="Name of the stresses or virials.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Take what a TOML file says for what the command line does not say."""
    if path is None:
        return None
    with _one_sentence():
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            content = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from error
        given = {name.replace("-", "_"): value for name, value in content.items()}
        allowed = [str(parameter.name) for parameter in context.command.params if parameter.name != "settings_file"]
        for name in given:
            if name not in allowed:
                hint = did_you_mean(name, allowed)
                raise ValueError(f"{path}: there is no setting {name!r}; allowed: {', '.join(allowed)}{hint}")
    context.default_map = {**(context.default_map or {}), **given}
    return path


SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        callback=_read_settings,
        is_eager=True,
        help="TOML file of options, under the names they have here; the command line has the last word.",
    ),
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the trained model.")] = Path("pmlip-demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 80,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0,
) -> None:
    """Train the noise of CHGNet on DFT structures of quartz; show its spread beside its error.

    Example: pmlip demo --steps 40
    """
    from pmlip.demo import run

    run(out, steps=steps, seed=seed, console=Console())


def _settings(config: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each field of a settings class, with the comment beside the field as its help."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(config), flags=re.MULTILINE))
        own = inspect.signature(command, eval_str=True)
        fixed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[field.type, typer.Option(help=comments.get(field.name, ""))],
            )
            for field in dataclasses.fields(config)
        ]
        command.__signature__ = own.replace(parameters=[*fixed, *options])  # type: ignore[attr-defined]  # what typer reads
        return command

    return decorate


@app.command()
@_settings(FinetuneConfig)
def finetune(
    train: Annotated[Path, typer.Argument(help="Structures with DFT labels: extxyz, ase.db, npz.")],
    backbone: Annotated[str, typer.Option(help="chgnet, orb:orb_v3_direct_20_omat, sevenn:7net-0, mace.")] = "chgnet",
    *,
    weights: Weights = None,
    trust: Trust = False,
    valid: Annotated[Path | None, typer.Option(help="Validation structures; by default a tenth of TRAIN.")] = None,
    method: Annotated[str, typer.Option(help="p, or a baseline: deterministic, ensemble, blip, ...")] = "p",
    option: Annotated[list[str] | None, typer.Option(help="Option of the method, as members=5; repeatable.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Train on so many structures, chosen by the seed.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the model and the state of the run.")] = Path("pmlip-model"),
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
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
    from pmlip.commands.finetune import run

    with _one_sentence():
        keys = {"energy_key": energy_key, "forces_key": forces_key, "stress_key": stress_key}
        record = run(
            train,
            valid,
            keys=keys,
            count=count,
            backbone=backbone,
            weights=weights,
            trust=trust,
            method=method,
            options=_options(option or []),
            config=FinetuneConfig(**settings),
            out=out,
            tensorboard=tensorboard,
            dry_run=dry_run,
            quiet=as_json,
        )
    _print_json(record, as_json and not dry_run and bool(record))


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
    exclude: Annotated[Path | None, typer.Option(help="Folder of a run whose structures are left out.")] = None,
    compare: Annotated[list[Path] | None, typer.Option(help="Another model, side by side; repeatable.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report to this HTML file.")] = None,
    weights: Weights = None,
    trust: Trust = False,
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
    from pmlip.commands.evaluate import run

    with _one_sentence():
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
            out=out,
            report=report,
            console=Console(quiet=as_json),
        )
    _print_json(record, as_json)


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
    settings_file: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Predict energy, forces and stress of structures, with their uncertainties.

    The file may be larger than memory. Run the same command again to go on after an interruption.

    Example: pmlip predict p-chgnet/model.pt structures.extxyz --samples 16 --out predictions.extxyz
    """
    from pmlip.commands.predict import run

    with _one_sentence():
        console = Console(quiet=as_json)
        record = run(model, data, out=out, samples=samples, seed=seed, weights=weights, trust=trust, console=console)
    _print_json(record, as_json)


@app.command()
def calibrate(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Structures with DFT forces that it was not trained on.")],
    *,
    out: Annotated[Path, typer.Option(help="File of the scaled model.")] = Path("calibrated.pt"),
    samples: Annotated[int, typer.Option(min=3, help="Samples K.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    level: Annotated[float, typer.Option(help="Probability of the conformal intervals.")] = 0.95,
    weights: Weights = None,
    trust: Trust = False,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    settings_file: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Scale the spread of a model by one factor, so that it fits the errors on these structures.

    Example: pmlip calibrate p-chgnet/model.pt valid.extxyz --out p-chgnet/calibrated.pt
    """
    from pmlip.commands.calibrate import run

    with _one_sentence():
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
            console=Console(quiet=as_json),
        )
    _print_json(record, as_json)


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
    from pmlip.commands.fold import run

    with _one_sentence():
        console = Console(quiet=as_json)
        record = run(model, out=out, sample=sample, seed=seed, weights=weights, trust=trust, console=console)
    _print_json(record, as_json)


@app.command()
def info(model: Model, as_json: AsJson = False) -> None:
    """Tell what a file of a model is: its backbone, data, settings, scores and versions.

    Example: pmlip info p-chgnet/model.pt
    """
    from pmlip.commands.info import run

    with _one_sentence():
        record = run(model, console=Console(quiet=as_json))
    _print_json(record, as_json)


def _print_json(record: Any, wanted: bool) -> None:
    if wanted:
        typer.echo(json.dumps(record, indent=2))


@bench.command()
def nbody(
    methods: Annotated[
        str, typer.Option(help="Methods, with commas between them.")
    ] = "egnn,ensemble,blip,mc-dropout,p-egnn",
    sizes: Annotated[str, typer.Option(help="Training sizes, with commas between them.")] = "1000,3000,10000",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to SEEDS - 1.")] = 4,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, one thread each.")] = 1,
    preset: Annotated[str, typer.Option(help="quick: minutes, to try it out; full: the benchmark.")] = "full",
    at_rest: Annotated[bool, typer.Option(help="Work in the frame of the centre of mass.")] = True,
    time_reversal: Annotated[bool, typer.Option(help="Train on the reversed trajectories too.")] = True,
    out: Annotated[Path, typer.Option(help="Folder of the result files; finished cells are skipped.")] = Path(
        "benchmarks/results/nbody"
    ),
    params: Annotated[bool, typer.Option("--params", help="Print the paper's table of parameters and stop.")] = False,
) -> None:
    """Where are five charged particles after a thousand steps? Trains each method from scratch.

    Example: pmlip bench nbody --preset quick --methods egnn,p-egnn --sizes 200,400 --seeds 2 --jobs 2 --out nbody-quick
    """
    from dataclasses import replace

    from pmlip.benchmark import nbody as benchmark
    from pmlip.nbody.methods import parameter_table

    if params:
        for name, count, ratio in parameter_table():
            typer.echo(f"{name:24} {count:8,} {ratio:5.2f}x")
        return
    with _one_sentence():
        if preset not in benchmark.PRESETS:
            raise ValueError(f"unknown preset {preset!r}; allowed: {', '.join(benchmark.PRESETS)}")
        chosen = benchmark.PRESETS[preset]
        settings = replace(chosen.settings, at_rest=at_rest, time_reversal=time_reversal)
        benchmark.run(
            methods=_listed(methods),
            sizes=_whole_numbers(sizes),
            seeds=seeds,
            preset=replace(chosen, settings=settings),
            folder=out,
            jobs=jobs,
            console=Console(),
        )


@bench.command()
def nbody_trials(
    methods: Annotated[
        str, typer.Option(help="Methods to tune, with commas between them.")
    ] = "egnn,blip,mc-dropout,p-egnn",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, one thread each.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the result files; finished trials are skipped.")] = Path(
        "benchmarks/results/nbody/trials"
    ),
) -> None:
    """Tune the recipes of the N-body benchmark on validation data: the same number of trials for each method.

    Example: pmlip bench nbody-trials --methods p-egnn --jobs 2
    """
    from pmlip.benchmark.nbody_trials import tune

    with _one_sentence():
        tune(_listed(methods), out, jobs=jobs, console=Console())


@bench.command()
def nbody_ablation(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to SEEDS - 1.")] = 2,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, one thread each.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the result files; finished ones are skipped.")] = Path(
        "benchmarks/results/nbody/ablation"
    ),
) -> None:
    """Change one thing of P-EGNN that its paper leaves untested: where the noise enters, whose it is, how much of it.

    Example: pmlip bench nbody-ablation --seeds 2 --jobs 2
    """
    from pmlip.benchmark.nbody_trials import ablate

    with _one_sentence():
        ablate(out, seeds=seeds, jobs=jobs, console=Console())


@bench.command()
def silica(
    data: Annotated[
        str, typer.Option(help="silica-pbe, a file with DFT labels, tan_silica:FILE or zeo22:FILE.")
    ] = "silica-pbe",
    backbone: Annotated[str, typer.Option(help="Backbone to fine-tune.")] = "chgnet",
    weights: Weights = None,
    test_data: Annotated[str | None, typer.Option(help="Test on this file, given as for --data.")] = None,
    unseen: Annotated[list[str] | None, typer.Option(help="Out-of-distribution structures; repeatable.")] = None,
    methods: Annotated[
        str, typer.Option(help="Methods, with commas between them.")
    ] = "p,blip,ensemble,mc-dropout,constant,force-scaled,deterministic",
    sizes: Annotated[str, typer.Option(help="Training sizes, with commas between them.")] = "32,128",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to SEEDS - 1.")] = 4,
    test: Annotated[int, typer.Option(min=3, help="Structures to test on, where the data has no such part.")] = 400,
    samples: Annotated[int, typer.Option(min=2, help="Samples K at test.")] = 32,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training set.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, one thread each.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the result files; finished cells are skipped.")] = Path(
        "benchmarks/results/silica"
    ),
) -> None:
    """Fine-tune a pretrained potential on silica by every method, and compare them.

    Example: pmlip bench silica --data silica-pbe --backbone chgnet --methods p,constant --sizes 32 --seeds 2
    """
    from pmlip.benchmark import silica as benchmark

    with _one_sentence():
        benchmark.run(
            benchmark.SilicaSettings(
                backbone=backbone,
                data=data,
                test_data=test_data,
                unseen=tuple(unseen or ()),
                weights=str(weights) if weights else None,
                test=test,
                test_samples=samples,
                config=FinetuneConfig(epochs=epochs),
            ),
            names=_listed(methods),
            sizes=_whole_numbers(sizes),
            seeds=seeds,
            folder=out,
            jobs=jobs,
            console=Console(),
        )


@bench.command()
def symmetry(
    backbone: Annotated[str, typer.Argument(help="Backbone, as for finetune.")],
    weights: Weights = None,
    trust: Trust = False,
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = Path("benchmarks/results/symmetry"),
) -> None:
    """Measure how far a sample of a turned structure is from the turned sample.

    Example: pmlip bench symmetry chgnet
    """
    from pmlip.benchmark.symmetry import run

    with _one_sentence():
        run(backbone, weights=weights, trust=trust, out=out, console=Console())


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_numbers(text: str) -> list[int]:
    for part in _listed(text):
        if not part.isdecimal():
            raise ValueError(f"whole numbers with commas between them are wanted, got {part!r}")
    return [int(part) for part in _listed(text)]


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """An error in one sentence, not a traceback: exit code 2 for what cannot be used, 1 for what failed otherwise."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except (ImportError, ConnectionError, MemoryError, CellError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(FAILED) from error


@bench.command()
def speed(
    only: Annotated[str | None, typer.Option(help="Measure this part alone: crps, nbody, step or predict.")] = None,
    backbone: Annotated[str, typer.Option(help="Backbone of the part predict.")] = "chgnet",
    weights: Weights = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files.")] = None,
) -> None:
    """Measure our parts beside their rivals in one run, as ratios.

    Example: pmlip bench speed --only crps
    """
    from pmlip.benchmark.speed import run

    with _one_sentence():
        run(only, out, Console(), backbone=backbone, weights=weights)
