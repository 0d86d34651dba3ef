"""The command line: parse, call, print."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    help="Makes machine-learning interatomic potentials tell how sure they are.",
    pretty_exceptions_enable=False,
)
bench = typer.Typer(no_args_is_help=True, help="Benchmarks; each writes result files.")
app.add_typer(bench, name="bench")

BAD_INPUT = 2


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
    with _bad_input():
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

    with _bad_input():
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

    with _bad_input():
        ablate(out, seeds=seeds, jobs=jobs, console=Console())


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_numbers(text: str) -> list[int]:
    for part in _listed(text):
        if not part.isdecimal():
            raise ValueError(f"whole numbers with commas between them are wanted, got {part!r}")
    return [int(part) for part in _listed(text)]


@contextlib.contextmanager
def _bad_input() -> Iterator[None]:
    """What was given cannot be used: one sentence and exit code 2, not a traceback."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error


@bench.command()
def speed(
    only: Annotated[str | None, typer.Option(help="Measure this part alone: crps or nbody.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files.")] = None,
) -> None:
    """Measure our parts beside their rivals in one run, as ratios.

    Example: pmlip bench speed --only crps
    """
    from pmlip.benchmark.speed import run

    with _bad_input():
        run(only, out, Console())
