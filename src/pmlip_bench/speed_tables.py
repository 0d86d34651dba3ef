"""Markdown tables of the result files of `pmlip bench speed`."""

from collections.abc import Sequence
from typing import Any

from pmlip.novelty import NAMES


def crps_markdown(result: dict[str, Any]) -> str:
    """Table of `crps.json`: the time of pmlip, and the time and memory of the alternatives relative to pmlip."""
    cost = {(row["samples"], row["task"], row["contestant"]): row for row in result["rows"]}
    lines = [
        "| K | | pmlip | scoringrules: time, memory | double sum: time, memory |",
        "|---|---|---|---|---|",
    ]
    for samples, task in dict.fromkeys((row["samples"], row["task"]) for row in result["rows"]):
        own = cost[samples, task, "pmlip"]
        cells = [str(samples), task, f"{1e3 * own['seconds']:.1f} ms"]
        for rival in ("scoringrules", "double sum"):
            other = cost[samples, task, rival]
            time_ratio, memory_ratio = (times(other[key], own[key]) for key in ("seconds", "peak_megabytes"))
            cells.append(f"{time_ratio}×, {memory_ratio}×")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def nbody_markdown(result: dict[str, Any]) -> str:
    """Table of `nbody.json`."""
    lines = ["| | pmlip | plain | times faster |", "|---|---|---|---|"]
    for row in result["rows"]:
        cells = (row["what"], f"{1e3 * row['seconds']:.2f} ms", f"{1e3 * row['plain']:.1f} ms", f"{row['ratio']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def step_markdown(result: dict[str, Any]) -> str:
    """Table of `step.json`."""
    first = result["rows"][0]
    lines = [
        "| K | samples at once | message passing | seconds | peak memory of the process | times that of K = 4 |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        peak = row["peak_rss_megabytes"]
        at_once = "all" if row["chunk"] is None else row["chunk"]
        passing = "in parts" if row["in_parts"] else "of the package"
        cells = (row["samples"], at_once, passing, f"{row['seconds']:.2f}", f"{peak:.0f} MB")
        lines.append(f"| {' | '.join(map(str, cells))} | {peak / first['peak_rss_megabytes']:.2f} |")
    return "\n".join(lines)


def predict_markdown(results: Sequence[dict[str, Any]]) -> str:
    """Table of all `predict-*.json`."""
    lines = ["| backbone | pmlip predict | stock calculator, K times | times faster |", "|---|---|---|---|"]
    for row in (row for result in results for row in result["rows"]):
        cells = (f"{1e3 * row[key]:.1f} ms" for key in ("seconds", "stock"))
        lines.append(f"| {row['backbone']} | {' | '.join(cells)} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def novelty_markdown(results: Sequence[dict[str, Any]]) -> str:
    """Table of all `novelty-*.json`."""
    lines = [
        "| backbone | atoms | features | one step | times the pass without novelty | times the stock calculator |",
        "|---|---|---|---|---|---|",
    ]
    for row in (row for result in results for row in result["rows"]):
        cells = (row["backbone"], row["atoms"], NAMES[row["features"]], f"{1e3 * row['seconds']:.0f} ms")
        lines.append(f"| {' | '.join(map(str, cells))} | {row['times_plain']:.2f} | {row['times_stock']:.2f} |")
    return "\n".join(lines)


def times(value: float, own: float) -> str:
    """The ratio value / own as text; "-" if own is 0."""
    return f"{value / own:.1f}" if own > 0 else "-"  # peak memory can be too small to measure
