"""What the commands share: options with their help, files of settings, errors in one sentence."""

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

from pmlip.errors import RunFailedError, did_you_mean

FAILED, BAD_INPUT = 1, 2

Model = Annotated[Path, typer.Argument(help="A model that finetune wrote.")]
Weights = Annotated[Path | None, typer.Option(help="Local file of the backbone's weights.")]
Trust = Annotated[bool, typer.Option(help="Load weights that are a pickle, which can execute code.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU where there is one.")]
EnergyKey = Annotated[str | None, typer.Option(help="Name of the energies; found by itself if common.")]
ForcesKey = Annotated[str | None, typer.Option(help="Name of the forces.")]
StressKey = Annotated[str | None, typer.Option(help="Name of the stresses or virials.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Take what a TOML file says for what the command line does not say."""
    if path is None:
        return None
    with exit_on_error():
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


def options_of(config: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


def print_json(record: Any, wanted: bool) -> None:
    if wanted:
        typer.echo(json.dumps(record, indent=2))


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """An error in one sentence, not a traceback: exit code 2 for what cannot be used, 1 for what failed otherwise."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except (ImportError, OSError, MemoryError, FloatingPointError, RunFailedError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(FAILED) from error
