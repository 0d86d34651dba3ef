"""The command line: parse, call, print."""

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
def speed(
    only: Annotated[str | None, typer.Option(help="Measure this part alone: crps.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files.")] = None,
) -> None:
    """Measure our parts beside their rivals in one run, as ratios.

    Example: pmlip bench speed --only crps
    """
    from pmlip.benchmark.speed import run

    try:
        run(only, out, Console())
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error
