"""`pmlip bench`: each command runs one benchmark and writes its result files and tables."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from pmlip.cli.options import (
    AsJson,
    Command,
    EnergyKey,
    ForcesKey,
    StressKey,
    Trust,
    Weights,
    exit_on_error,
    print_json,
)
from pmlip.locks import locked_folder
from pmlip.training.config import FinetuneConfig

EXTRA = ("matplotlib", "numba", "scoringrules")  # packages of the extra `bench`


class BenchCommand(Command):
    """A command that names the extra to install if a package of the extra is missing."""

    def invoke(self, ctx: Any) -> Any:
        with exit_on_error(self.params), _name_the_extra():
            return TyperCommand.invoke(self, ctx)


@contextlib.contextmanager
def _name_the_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        reason = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (reason.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        raise ImportError(f"this benchmark needs {package}: pip install 'pmlip[bench]'") from error


bench = typer.Typer(no_args_is_help=True, add_completion=False, help="Run the benchmarks; each writes result files.")

Jobs = Annotated[int, typer.Option(min=1, help="Processes to run at the same time, with one thread each.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds; they are 0 to SEEDS - 1.")]
Sizes = Annotated[str, typer.Option(help="Sizes of the training set, separated by commas.")]
Methods = Annotated[str, typer.Option(help="Methods to run, separated by commas.")]
Results = Annotated[
    Path,
    typer.Option(
        help="Folder for the result files; results that are already in it are kept.", rich_help_panel="Output"
    ),
]


@bench.command(cls=BenchCommand)
def nbody(
    methods: Methods = "egnn,ensemble,blip,mc-dropout,p-egnn,p-ensemble",
    sizes: Annotated[
        str | None,
        typer.Option(help="Sizes of the training set, separated by commas. Default: the sizes of the preset."),
    ] = None,
    seeds: Seeds = 4,
    jobs: Jobs = 1,
    preset: Annotated[
        str, typer.Option(help="quick: a small version that takes minutes; full: the benchmark.")
    ] = "full",
    at_rest: Annotated[bool, typer.Option(help="Predict in the centre-of-mass frame; the paper does not.")] = True,
    time_reversal: Annotated[
        bool, typer.Option(help="Train on the time-reversed trajectories too; the paper does not.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the result files; by default benchmarks/results/nbody, or nbody-quick.",
            rich_help_panel="Output",
        ),
    ] = None,
    params: Annotated[
        bool, typer.Option("--params", help="Print the number of parameters of each model and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train each method from scratch to predict the positions of five charged particles after 1000 time steps.

    Example: pmlip bench nbody --preset quick --methods egnn,p-egnn --seeds 2 --jobs 2
    """
    from pmlip_bench.nbody import cells as benchmark
    from pmlip_bench.nbody.methods import parameter_table

    if params:
        for name, count, ratio in parameter_table():
            typer.echo(f"{name:24} {count:8,} {ratio:5.2f}x")
        return
    if preset not in benchmark.PRESETS:
        raise ValueError(f"unknown preset {preset!r}; allowed: {', '.join(benchmark.PRESETS)}")
    chosen = benchmark.PRESETS[preset]
    settings = replace(chosen.settings, at_rest=at_rest, time_reversal=time_reversal)
    folder = out or Path("nbody-quick" if preset == "quick" else "benchmarks/results/nbody")
    with locked_folder(folder):
        rows = benchmark.run(
            methods=_listed(methods),
            sizes=chosen.sizes if sizes is None else _whole_numbers(sizes),
            seeds=seeds,
            preset=replace(chosen, settings=settings),
            folder=folder,
            jobs=jobs,
            console=Console(quiet=as_json),
        )
    print_json(rows, as_json)


@bench.command(cls=BenchCommand)
def nbody_trials(
    methods: Methods = "egnn,blip,mc-dropout,p-egnn",
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/nbody/trials"),
) -> None:
    """Tune the training settings of the N-body benchmark on validation data, with equally many trials per method.

    Example: pmlip bench nbody-trials --methods p-egnn --jobs 2
    """
    from pmlip_bench.nbody.trials import tune

    with locked_folder(out):
        tune(_listed(methods), out, jobs=jobs, console=Console())


@bench.command(cls=BenchCommand)
def nbody_ablation(
    seeds: Seeds = 2,
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/nbody/ablation"),
) -> None:
    """Compare variants of P-EGNN that its paper does not test: where noise enters, what shares it, its dimension.

    Example: pmlip bench nbody-ablation --seeds 2 --jobs 2
    """
    from pmlip_bench.nbody.trials import ablate

    with locked_folder(out):
        ablate(out, seeds=seeds, jobs=jobs, console=Console())


@bench.command(cls=BenchCommand)
def silica(
    data: Annotated[
        str,
        typer.Option(
            help="silica-pbe (included), a file with DFT labels, tan_silica:FILE or zeo22:FILE.", rich_help_panel="Data"
        ),
    ] = "silica-pbe",
    backbone: Annotated[
        str, typer.Option(help="Pretrained potential to fine-tune.", rich_help_panel="Model")
    ] = "chgnet",
    weights: Weights = None,
    trust: Trust = False,
    test_data: Annotated[
        str | None,
        typer.Option(help="Test structures, in the form of --data; by default a part of DATA.", rich_help_panel="Data"),
    ] = None,
    unseen: Annotated[
        list[str] | None,
        typer.Option(help="Out-of-distribution structures to test on, too; repeatable.", rich_help_panel="Data"),
    ] = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    methods: Methods = "p,blip,ensemble,mc-dropout,constant,force-scaled,deterministic",
    sizes: Sizes = "32,128",
    seeds: Seeds = 4,
    test: Annotated[
        int | None,
        typer.Option(
            min=3,
            help="Structures to set aside for testing if DATA has no test set; by default 400.",
            rich_help_panel="Data",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=3, help="Samples K per test structure.")] = 32,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of each model; by default about 600.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Structures per training step; lower it to save memory.")
    ] = FinetuneConfig.batch,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Samples per forward pass; lower it if a step runs out of memory.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel="Model")] = "cpu",
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/silica"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune a pretrained potential on silica with each method, and compare the methods.

    Example: pmlip bench silica --methods p,constant --sizes 32 --seeds 2 --steps 400 --jobs 2
    """
    from pmlip.cli.checks import chosen_device
    from pmlip_bench.silica.cells import run
    from pmlip_bench.silica.data import SHIPPED, SilicaSettings

    data = SHIPPED if data == "silica_pbe" else data  # accept the name of the Python function too
    if test is not None and (data == SHIPPED or test_data):
        reason = f"--test-data {test_data} is the test set" if test_data else f"{data} includes a test set"
        raise ValueError(f"--test {test} cannot be used here, because {reason}; omit --test")
    with locked_folder(out):
        rows = run(
            SilicaSettings(
                backbone=backbone,
                data=data,
                test_data=test_data,
                unseen=tuple(unseen or ()),
                weights=str(weights) if weights else None,
                trust=trust,
                energy_key=energy_key,
                forces_key=forces_key,
                stress_key=stress_key,
                test=SilicaSettings.test if test is None else test,
                test_samples=samples,
                config=FinetuneConfig(steps=steps, batch=batch, chunk=chunk, tangent=False),
            ),
            names=_listed(methods),
            sizes=_whole_numbers(sizes),
            seeds=seeds,
            folder=out,
            jobs=jobs,
            console=Console(quiet=as_json),
            device=chosen_device(device),
        )
    print_json(rows, as_json)


@bench.command(cls=BenchCommand)
def silica_trials(
    methods: Methods = "p,blip,mc-dropout,deterministic",
    seeds: Seeds = 2,
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/silica/trials"),
) -> None:
    """Tune the fine-tuning settings of CHGNet on validation data, with equally many trials per method.

    Example: pmlip bench silica-trials --methods p,blip --jobs 2
    """
    from pmlip_bench.silica.cells import run
    from pmlip_bench.silica.data import TUNING, SilicaSettings
    from pmlip_bench.silica.variants import BEFORE, trials

    with locked_folder(out):
        run(
            SilicaSettings(backbone="chgnet", data=TUNING, config=BEFORE),
            names=trials(_listed(methods)),
            sizes=[48],
            seeds=seeds,
            folder=out,
            jobs=jobs,
            console=Console(),
        )


@bench.command(cls=BenchCommand)
def ethanol(
    data: Annotated[
        Path,
        typer.Option(
            help="Folder with the ethanol files of davkovacs/BOTNet-datasets: train.xyz, test_MD.xyz, ...",
            rich_help_panel="Data",
        ),
    ],
    methods: Methods = "deterministic,p",
    seeds: Seeds = 1,
    samples: Annotated[int, typer.Option(min=3, help="Samples K per test structure.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 400,
    batch: Annotated[
        int, typer.Option(min=1, help="Structures per training step; lower it to save memory.")
    ] = FinetuneConfig.batch,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel="Model")] = "cpu",
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/ethanol"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune CHGNet on MD of ethanol, and test it along a broken bond and on other unseen structures.

    Example: pmlip bench ethanol --data ethanol --methods deterministic,p --seeds 1
    """
    from pmlip.cli.checks import chosen_device
    from pmlip_bench.ethanol.cells import run
    from pmlip_bench.ethanol.data import EthanolSettings

    with locked_folder(out):
        rows = run(
            EthanolSettings(data=str(data), test_samples=samples, config=FinetuneConfig(steps=steps, batch=batch)),
            names=_listed(methods),
            seeds=seeds,
            folder=out,
            jobs=jobs,
            console=Console(quiet=as_json),
            device=chosen_device(device),
        )
    print_json(rows, as_json)


@bench.command(cls=BenchCommand)
def symmetry(
    backbone: Annotated[str, typer.Argument(help="Pretrained potential, named as for `pmlip finetune`.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Fine-tuned model of this backbone. Default: the backbone with random noise weights.",
            rich_help_panel="Model",
        ),
    ] = None,
    weights: Weights = None,
    trust: Trust = False,
    out: Annotated[Path, typer.Option(help="Folder for the result file.", rich_help_panel="Output")] = Path(
        "benchmarks/results/symmetry"
    ),
) -> None:
    """Measure the rotation error of samples: the sample of a rotated structure against the rotated sample.

    Example: pmlip bench symmetry chgnet
    """
    from pmlip_bench.symmetry import run

    with locked_folder(out):
        run(backbone, model=model, weights=weights, trust=trust, out=out, console=Console())


@bench.command(cls=BenchCommand)
def speed(
    only: Annotated[
        str | None, typer.Option(help="Measure only this part: crps, nbody, step, predict or novelty.")
    ] = None,
    backbone: Annotated[
        str, typer.Option(help="Pretrained potential for the parts predict and novelty.", rich_help_panel="Model")
    ] = "chgnet",
    weights: Weights = None,
    trust: Trust = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the result files; by default none are written.", rich_help_panel="Output"),
    ] = None,
) -> None:
    """Measure the speed of pmlip relative to other implementations.

    Example: pmlip bench speed --only crps
    """
    from pmlip_bench.speed import run

    with locked_folder(out) if out else contextlib.nullcontext():
        run(only, out, Console(), backbone=backbone, weights=weights, trust=trust)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_numbers(text: str) -> list[int]:
    for part in _listed(text):
        if not part.isdecimal() or int(part) == 0:
            raise ValueError(f"sizes are whole numbers of at least 1, separated by commas, got {part!r}")
    return [int(part) for part in _listed(text)]
