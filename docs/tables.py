"""Update the tables in README.md and docs/*.md from the result files: python docs/tables.py

`python docs/tables.py --compare REVISION` tells which tables differ from those at a git revision instead.

In a page, each table stands between `<!-- table: NAME -->` and `<!-- end -->`. A test fails if a table is out of date.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pmlip_bench import speed_tables, symmetry
from pmlip_bench.ethanol import tables as ethanol_tables
from pmlip_bench.nbody import tables as nbody_tables
from pmlip_bench.publish import Results
from pmlip_bench.runner import read_cells
from pmlip_bench.silica import tables as silica_tables

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- table: ([\w ]+) -->)\n(.*?)(<!-- end -->)", flags=re.DOTALL)
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]


def _speed(name: str, markdown: Callable[[Any], str]) -> str:
    return markdown(json.loads((RESULTS / "speed" / f"{name}.json").read_text()))


def _read(pattern: str) -> list[Any]:
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob(pattern))]


def _silica(data: str, make: Callable[[Results], str]) -> str:
    """A table of all cells of one data set."""
    results = read_cells(RESULTS / "silica")
    return make({cell: result for cell, result in results.items() if result["cell"]["data"] == data})


TABLES: dict[str, Callable[[], str]] = {
    "crps": lambda: _speed("crps", speed_tables.crps_markdown),
    "nbody step": lambda: _speed("nbody", speed_tables.nbody_markdown),
    "step": lambda: _speed("step", speed_tables.step_markdown),
    "predict": lambda: speed_tables.predict_markdown(_read("speed/predict-*.json")),
    "novelty speed": lambda: speed_tables.novelty_markdown(_read("speed/novelty-*.json")),
    "symmetry": lambda: symmetry.markdown(_read("symmetry/*.json")),
    "nbody": lambda: nbody_tables.table(read_cells(RESULTS / "nbody")),
    "nbody overview": lambda: nbody_tables.overview(read_cells(RESULTS / "nbody")),
    "nbody details": lambda: nbody_tables.details(read_cells(RESULTS / "nbody")),
    "nbody ablation": lambda: nbody_tables.ablations(
        read_cells(RESULTS / "nbody" / "ablation"), read_cells(RESULTS / "nbody")
    ),
    "ethanol": lambda: ethanol_tables.table(read_cells(RESULTS / "ethanol")),
    "ethanol path": lambda: ethanol_tables.path_table(read_cells(RESULTS / "ethanol")),
    "silica overview": lambda: silica_tables.overview(read_cells(RESULTS / "silica")),
    "tangent trials": lambda: silica_tables.cover_table(read_cells(RESULTS / "silica" / "tangent")),
    "silica trials": lambda: silica_tables.trials_table(read_cells(RESULTS / "silica" / "trials")),
    **{
        f"{title}{kind}": partial(_silica, data, make)
        for title, data in {"silica": "silica-pbe", "zeolite": "edi"}.items()
        for kind, make in {
            "": silica_tables.table,
            " ranking": silica_tables.ranking_table,
            " unseen": silica_tables.unseen_table,
            " together": silica_tables.together_table,
        }.items()
    },
}


def up_to_date(text: str) -> str:
    """The text of a page with all tables updated from the result files."""

    def replaced(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]]().rstrip()}\n{found[4]}"

    return TABLE.sub(replaced, text)


def tables_at(revision: str) -> dict[str, str]:
    """The tables that the pages showed at a revision, by name."""
    found: dict[str, str] = {}
    listed = subprocess.check_output(["git", "ls-tree", "-r", "--name-only", revision], cwd=PROJECT, text=True)
    for page in (name for name in listed.splitlines() if name.endswith(".md")):
        text = subprocess.check_output(["git", "show", f"{revision}:{page}"], cwd=PROJECT, text=True)
        found |= {name: table for _, name, table, _ in TABLE.findall(text)}
    return found


def compare(revision: str) -> int:
    """Print which tables have changed since a revision; the number of changed tables."""
    before = tables_at(revision)
    changed = [name for name, table in before.items() if TABLES[name]().strip() != table.strip()]
    print(f"{len(before)} tables at {revision}, {len(changed)} changed: {', '.join(changed) or 'none'}")
    return len(changed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.exit(compare(sys.argv[2]) > 0)
    for page in PAGES:
        page.write_text(up_to_date(page.read_text()))
