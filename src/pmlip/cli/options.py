"""What the commands share: options with their help, settings files, and errors in one sentence."""

import contextlib
import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pmlip.errors import RunFailedError, did_you_mean

FAILED, BAD_INPUT = 1, 2
PANELS = ("Data", "Model", "Training", "Noise", "Output", "Expert")  # order of the help panels of a command

Model = Annotated[
    Path,
    typer.Argument(help="Folder of a run of `pmlip finetune`, for example p-chgnet, or a model file."),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="Local file with the backbone's weights; needed if the backbone's package does not provide them.",
        rich_help_panel="Model",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        help="Load weights stored as a pickle, which can execute code; use it only for files you trust.",
        rich_help_panel="Model",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.", rich_help_panel="Model"),
]
EnergyKey = Annotated[
    str | None,
    typer.Option(
        help="Name of the energies in the file; needed only if they are not found by their usual names.",
        rich_help_panel="Data",
    ),
]
ForcesKey = Annotated[str | None, typer.Option(help="Name of the forces in the file.", rich_help_panel="Data")]
StressKey = Annotated[
    str | None, typer.Option(help="Name of the stresses or virials in the file.", rich_help_panel="Data")
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON and nothing else, for scripts.", rich_help_panel="Output"),
]


def _read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a TOML file as the defaults of the options."""
    if path is None:
        return None
    with exit_on_error(context.command.params):
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
        help="TOML file with values for these options; the command line overrides it.",
    ),
]


def options_of(config: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace `**settings` of a command by one option for each field of a settings class.

    The metadata of a field hold its help and the panel ("group") it is shown in.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        fixed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[
                    field.type,
                    typer.Option(help=field.metadata["help"], rich_help_panel=field.metadata["group"]),
                ],
            )
            for field in dataclasses.fields(config)
        ]
        # typer reads this signature, and shows the panels in the order in which their first options come
        command.__signature__ = own.replace(parameters=sorted([*fixed, *options], key=_panel))  # type: ignore[attr-defined]
        return command

    return decorate


def _panel(parameter: inspect.Parameter) -> int:
    """Position of the parameter's help panel; parameters without one come first."""
    panels = [entry.rich_help_panel for entry in parameter.annotation.__metadata__]
    return PANELS.index(panels[0]) if panels[0] else -1


def print_json(record: Any, wanted: bool) -> None:
    if wanted:
        typer.echo(json.dumps(record, indent=2))


class Command(TyperCommand):
    """A command that reports errors in one sentence, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        with exit_on_error(self.params):
            return super().invoke(ctx)


@contextlib.contextmanager
def exit_on_error(params: Iterable[Any] = ()) -> Iterator[None]:
    """Print an error as one sentence and exit: with code 2 for bad input, with code 1 for any other failure.

    params: parameters of the command. The message names their flags.
    """
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {as_flags(str(error), params)}", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except (ImportError, OSError, MemoryError, FloatingPointError, RunFailedError) as error:
        typer.echo(f"error: {as_flags(str(error), params) or type(error).__name__}", err=True)
        raise typer.Exit(FAILED) from error


OTHER_NAMES = {"folder": "out"}  # arguments of the library whose option has another name
# an argument with a value such as True, 0.5, 'text', PATH or ...; but not a part of a path
ARGUMENT = re.compile(
    r"(?<![\w./\\-])(\w+)=('[^']*'|\.\.\.|True|False|[A-Z]+|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w/\\]|\.\w)"
)


def as_flags(message: str, params: Iterable[Any]) -> str:
    """A message of the library with its arguments written as flags of a command, where the command has them.

    missing=True -> --missing; offsets=False -> --no-offsets; weights=PATH -> --weights PATH; folder=... -> --out ...
    """
    options = {parameter.name: parameter for parameter in params if parameter.param_type_name == "option"}

    def flag(found: re.Match[str]) -> str:
        option, value = options.get(OTHER_NAMES.get(found[1], found[1])), found[2].strip("'")
        if option is None:
            return found[0]
        if not option.is_flag:
            return f"{option.opts[0]} {value}"
        switches = option.opts if value == "True" else option.secondary_opts
        return str(switches[0]) if switches else found[0]

    return ARGUMENT.sub(flag, message)
