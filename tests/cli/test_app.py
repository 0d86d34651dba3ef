"""The app itself: what it imports and when, and what it says about its commands."""

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pmlip
from pmlip.cli import COMMANDS, app, load_command
from pmlip.cli.options import PANELS

SOURCE = Path(pmlip.__file__).parent
LIBRARY = [file for file in sorted(SOURCE.rglob("*.py")) if "cli" not in file.relative_to(SOURCE).parts]
BENCHMARKS = [file for file in sorted((SOURCE.parent / "pmlip_bench").rglob("*.py")) if file.name != "cli.py"]
HEAVY = {"torch", "numpy", "ase", "scipy", "matplotlib"}
PROBE = """
import os, sys
os.environ |= {environment!r}
sys.argv = {arguments!r}
from pmlip.cli import app
try:
    app(prog_name="pmlip")
except SystemExit as ended:
    assert not ended.code, ended.code
print("modules:", *sys.modules)
"""


def run(*arguments, **environment):
    """What a new process prints, and the packages that it imports."""
    code = PROBE.format(arguments=["pmlip", *arguments], environment=environment)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    text, _, modules = result.stdout.rpartition("modules:")
    return text, {module.partition(".")[0] for module in modules.split()}


@pytest.mark.parametrize("command", ["", *COMMANDS, "bench silica"])
def test_help_imports_nothing_heavy(command):
    text, modules = run(*command.split(), "--help")
    assert "Usage" in text
    assert not modules & HEAVY


def test_the_version_imports_nothing_heavy():
    text, modules = run("--version")
    assert text.strip() == f"pmlip {version('pmlip')}"
    assert not modules & HEAVY
    assert "pmlip_bench" not in modules


@pytest.mark.parametrize(
    ("typed", "completions"),
    [("pmlip fi", ["finetune"]), ("pmlip finetune --freeze", ["--freeze-backbone"]), ("pmlip bench sil", ["silica"])],
)
def test_shell_completion_imports_nothing_heavy(typed, completions):
    words = str(len(typed.split()) - 1)
    text, modules = run(_PMLIP_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=words)
    assert set(completions) <= set(text.split())
    assert not modules & HEAVY


def test_short_help_is_the_first_line_of_the_help():
    for name, help in COMMANDS.items():
        assert load_command(name).help.splitlines()[0] == help


def test_every_command_has_its_own_file():
    shared = {"__init__", "options", "checks", "progress", "score_table"}
    assert {file.stem for file in (SOURCE / "cli").glob("*.py")} - shared == set(COMMANDS)


def test_an_unknown_command_is_bad_input_with_a_suggestion():
    result = CliRunner().invoke(app, ["finetun"])
    assert result.exit_code == 2
    assert "Did you mean 'finetune'?" in " ".join(result.stderr.replace("│", " ").split())


def options(name):
    return [parameter for parameter in load_command(name).params if parameter.param_type_name == "option"]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_every_parameter_has_help(command):
    for parameter in load_command(command).params:
        assert parameter.help, parameter.name


def test_options_of_finetune_are_in_panels_in_this_order():
    panels = list(dict.fromkeys(option.rich_help_panel for option in options("finetune")))
    assert panels == [None, *PANELS]
    assert {option.name for option in options("finetune") if option.rich_help_panel is None} == {
        "settings_file",
        "dry_run",
    }


def test_every_setting_is_an_option_with_its_help_and_default():
    from pmlip.training.config import FinetuneConfig

    found = {option.name: option for option in options("finetune")}
    for name, field in FinetuneConfig.__dataclass_fields__.items():
        assert found[name].help == field.metadata["help"]
        assert found[name].rich_help_panel == field.metadata["group"]
        assert found[name].default == field.default


def literals(file):
    return [
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("file", [*LIBRARY, *BENCHMARKS], ids=lambda file: str(file.relative_to(SOURCE.parent)))
def test_only_the_command_line_names_flags(file):
    """Errors of the library name arguments: `as_flags` translates them."""
    for text in literals(file):
        assert not re.search(r"(?<![-\w])--[a-z]|\s--$", text), text  # or a flag that an f-string completes


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", LIBRARY, ids=lambda file: str(file.relative_to(SOURCE.parent)))
def test_the_library_imports_neither_the_command_line_nor_the_benchmarks(file):
    if file.name != "__main__.py":
        for name in imported(file):
            assert not name.startswith(("pmlip.cli", "pmlip_bench")), name
