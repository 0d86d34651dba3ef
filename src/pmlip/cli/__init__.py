"""The command line, one file per command: parse, call the library, print.

A command's file is imported when the command is used, and imports torch when the command runs, so that help and shell
completion are fast.
"""

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import pmlip
from pmlip.cli.options import Command, exit_on_error
from pmlip.memory import keep_freed_memory

__all__ = ["app", "load_command"]

# name of the command, its file and its function, and the first line of its help
COMMANDS = {
    "demo": "Fine-tune CHGNet on the silica data included in pmlip, and compare its spread with its error.",
    "finetune": "Fine-tune a pretrained potential on DFT data, so that it predicts an uncertainty.",
    "evaluate": "Score the predictions and uncertainties of a model on structures with DFT labels.",
    "predict": "Predict energy, forces and stress of structures, with uncertainties.",
    "calibrate": "Scale the spread of a model to its errors on held-out structures.",
    "novelty": "Let a model tell how unusual a structure is, compared with its training set.",
    "fold": "Write one sample of a model as an ordinary file of the potential's own package.",
    "info": "Show the backbone, training data, settings, scores and versions of a model.",
    "bench": "Run the benchmarks; each writes result files.",
}


def load_command(name: str) -> Any:
    """The command, imported from its file."""
    with exit_on_error():
        found = getattr(importlib.import_module(f"pmlip.cli.{name}"), name)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False)
        alone.command(name, cls=Command)(found)
        found = alone
    return get_command(found)


class _NotLoaded(TyperCommand):
    """Name and short help of a command; the first use of the command imports its file."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return load_command(str(self.name)).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, help in COMMANDS.items():
            self.add_command(_NotLoaded(name, help=help))


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pmlip {pmlip.__version__}")
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Uncertainties for machine-learning interatomic potentials: fine-tune, evaluate, calibrate and predict."""
    keep_freed_memory()
