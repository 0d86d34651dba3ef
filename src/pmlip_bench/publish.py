"""Writes the table (table.md, table.json) and the figure from the result files of a benchmark, into the same folder."""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pmlip.atomic_files import atomic_write, write_json
from pmlip_bench.runner import Cell, read_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = dict[Cell, dict[str, Any]]


def publish(
    folder: Path,
    *,
    table: Callable[[Results], str],
    summary: Callable[[Results], list[dict[str, Any]]],
    figure: Callable[[Results], "Figure"],
    figure_name: str = "figure.png",
    console: Console,
) -> list[dict[str, Any]]:
    """Write the table and the figure of all finished cells; return the rows of the table."""
    results = read_cells(folder)
    if not results:
        return []
    with atomic_write(folder / "table.md") as file:
        file.write(table(results).encode())
    rows = summary(results)
    write_json(folder / "table.json", rows)
    with atomic_write(folder / figure_name) as file:
        figure(results).savefig(file, dpi=150, format="png")
    console.print(table(results), soft_wrap=True, markup=False)
    return rows


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation; the deviation of a single value is 0."""
    return {"mean": statistics.mean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def with_deviation(value: dict[str, float], scale: float = 1.0, digits: int = 2) -> str:
    """`mean ± standard deviation` as text; only the mean if the deviation is 0, as for a single seed."""
    deviation = f" ± {scale * value['std']:.{digits}f}" if value["std"] else ""
    return f"{scale * value['mean']:.{digits}f}{deviation}"


def check_installed() -> None:
    """Raise an error before a long run if matplotlib, which draws the figure at the end, is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("the figure needs matplotlib: pip install 'pmlip[bench]'")


def empty_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_score(
    axes: "Axes", rows: Sequence[dict[str, Any]], methods: Sequence[str], name: str, *, scale: float = 1.0
) -> None:
    """Plot a score of each method against the size of the training set; the paper's values are dashed."""
    for number, method in enumerate(methods):
        for key, style in ((name, "o-"), (f"paper_{name}", "s--")):
            found = [row for row in rows if row["method"] == method and key in row]
            if not found:
                continue
            sizes = [row["size"] for row in found]
            mean, std = ([scale * row[key][part] for row in found] for part in ("mean", "std"))
            label = method if key == name else f"{method}, paper"
            axes.errorbar(sizes, mean, yerr=std, fmt=style, color=f"C{number}", label=label, capsize=3)
    if name == "ssr":
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    sizes = sorted({row["size"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
