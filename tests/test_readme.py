import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pmlip.cli import app

PROJECT = Path(__file__).parents[1]
TABLES = runpy.run_path(str(PROJECT / "docs" / "tables.py"))
SNIPPETS = [
    pytest.param(
        file, id=str(file.relative_to(PROJECT)), marks=[] if file.name == "CONTRIBUTING.md" else [pytest.mark.slow]
    )
    for file in [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").glob("*.md"))]
    if "```python" in file.read_text()
]


@pytest.mark.filterwarnings("ignore:.* lies outside the training set:UserWarning")  # as the pages say
@pytest.mark.usefixtures("quick_energy_zero")
@pytest.mark.parametrize("file", SNIPPETS)
def test_snippets_run(file, tmp_path, monkeypatch):
    """All blocks of Python and of commands of a page, one after the other, as a reader would run them."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "snippets"}
    for language, block in re.findall(r"```(python|sh)\n(.*?)```", file.read_text(), flags=re.DOTALL):
        if language == "python":
            exec(compile(block, str(file), "exec"), names)
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            if program == "pmlip":  # the others install
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.mark.parametrize("page", TABLES["PAGES"], ids=lambda page: page.name)
def test_tables_are_those_of_the_result_files(page):
    text = page.read_text()
    assert TABLES["up_to_date"](text) == text, "python docs/tables.py writes them"


def test_there_are_snippets():
    assert SNIPPETS


def test_the_readme_names_the_commands_that_ci_runs():
    readme = (PROJECT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
    assert "make test" in (PROJECT / ".ci" / "run").read_text()
