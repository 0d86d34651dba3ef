"""Tables and picture of the ethanol benchmark."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pmlip.novelty import OUTSIDE
from pmlip_bench.ethanol.data import PATH
from pmlip_bench.publish import Results, empty_figure, over_seeds, with_deviation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# name -> title, place in the entry of a set, scale and digits
COLUMNS: Mapping[str, tuple[str, tuple[str, ...], float, int]] = {
    "force_mae": ("F-MAE", ("forces", "mae"), 1e3, 0),
    "force_crps": ("F-CRPS", ("forces", "crps"), 1e3, 0),
    "ssr": ("SSR", ("forces", "ssr"), 1, 2),
    "ssr_one_pass": ("SSR of one pass", ("forces", "ssr_one_pass"), 1, 2),
    "energy_mae": ("E-MAE", ("relative_energy", "mae"), 1, 3),
    "energy_mae_inside": ("of structures inside", ("relative_energy", "mae_inside"), 1, 3),
    "energy_mae_outside": ("outside", ("relative_energy", "mae_outside"), 1, 3),
    "energy_ssr": ("E-SSR", ("relative_energy", "ssr"), 1, 2),
    "novelty": ("novelty", ("novelty", "0.5"), 1, 1),
    "outside": ("outside, %", ("outside",), 100, 0),
    "auroc_novelty": ("AUROC of novelty", ("auroc_novelty",), 1, 2),
    "auroc_spread": ("of the spread", ("auroc_spread",), 1, 2),
}
IN_RANGES = {
    "force_error": "force error",
    "force_spread": "spread",
    "one_pass_error_bar": "one-pass error bar",
    "novelty": "novelty",
    "hydrogen_novelty": "of the hydrogen",
    "energy_error": "energy error",
    "energy_spread": "spread",
}
LATER = (1.5, 2.5, 4.0)  # Å, ends of the ranges of the O-H distance beyond the training set


def summary(results: Results) -> list[dict[str, Any]]:
    """Rows with mean and standard deviation over seeds for each set of structures and method."""
    rows = []
    for method, found in _by_method(results).items():
        for place in found[0]["sets"]:
            entries = [_entry(result, place) for result in found]
            row: dict[str, Any] = {"structures": place, "count": entries[0]["structures"], "method": method}
            row["seeds"] = len(found)
            for name, (_, keys, _, _) in COLUMNS.items():
                values = [value for value in (_value(entry, keys) for entry in entries) if value is not None]
                if values:
                    row[name] = over_seeds(values)
            rows.append(row)
    places = list(dict.fromkeys(row["structures"] for row in rows))
    return sorted(rows, key=lambda row: places.index(row["structures"]))


def _by_method(results: Results) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell, result in sorted(results.items(), key=lambda item: (item[0].method, item[0].seed)):
        groups.setdefault(cell.method, []).append(result)
    return groups


def _entry(result: dict[str, Any], place: str) -> dict[str, Any]:
    """The entry of a set; the force along the bond stands for the forces of the path, which has no others."""
    entry = dict(result["sets"][place])
    entry["outside"] = entry["outside_the_training_set"] / entry["structures"]
    return entry | {"forces": result["path"]["scores"]} if place == PATH else entry


def _value(entry: Any, keys: Sequence[str]) -> float | None:
    for key in keys:
        entry = entry.get(key, {})
    return entry if isinstance(entry, int | float) else None


def table(results: Results) -> str:
    """Markdown table of all sets: forces in meV/Å, relative energies in eV."""
    heading = ["structures", "", "method", *(title for title, *_ in COLUMNS.values()), "seeds"]
    lines = [
        [
            *(row["structures"], row["count"], row["method"]),
            *(
                with_deviation(row[name], scale, digits) if name in row else ""
                for name, (_, _, scale, digits) in COLUMNS.items()
            ),
            row["seeds"],
        ]
        for row in summary(results)
    ]
    return _markdown(heading, lines)


def path_table(results: Results) -> str:
    """Markdown table for ranges of the O-H distance; root mean squares in eV and Å, and the median novelty."""
    heading = ["O-H distance", "frames", "method", *IN_RANGES.values()]
    lines = []
    for low, high in _ranges(results):
        for method, found in _by_method(results).items():
            seeds = [[frame for frame in frames(result) if low <= frame["oh_distance"] < high] for result in found]
            if not seeds[0]:
                continue
            lines.append([f"{low:.2f} to {high:.2f} Å", len(seeds[0]), method])
            for name in IN_RANGES:
                over = statistics.median if name in ("novelty", "hydrogen_novelty") else _root_mean_square
                known = [over([frame[name] for frame in seed]) for seed in seeds if name in seed[0]]
                lines[-1].append(with_deviation(over_seeds(known), 1, 2) if known else "")
    return _markdown(heading, lines)


def frames(result: dict[str, Any]) -> list[dict[str, float]]:
    """One record per structure of the path."""
    found: list[dict[str, float]] = result["path"]["frames"]
    return found


def _ranges(results: Results) -> list[tuple[float, float]]:
    """Ranges of the O-H distance; one of them is the range of the training set, including its ends."""
    first = next(iter(results.values()))
    distances = [frame["oh_distance"] for frame in frames(first)]
    low, high = first["path"]["trained"]
    edges = sorted({distances[0], low, high + 1e-6, *LATER, distances[-1] + 1e-6})
    return list(itertools.pairwise(edges))


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


def _markdown(heading: list[str], lines: list[list[Any]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows) + "\n"


# title -> curves: name in the records, label, style
PANELS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "force along O-H, eV/Å": (
        ("force_error", "error", "k-"),
        ("force_spread", "spread of the samples", "C0-"),
        ("one_pass_error_bar", "one-pass error bar", "C1--"),
    ),
    "energy, eV": (("energy_error", "error", "k-"), ("energy_spread", "spread of the samples", "C0-")),
    "novelty": (("novelty", "novelty of the structure", "C2-"), ("hydrogen_novelty", "of the hydrogen alone", "C4--")),
}
SMALLEST = (1e-3, 1e-3, 0.1)  # smaller values are not shown, in the order of the panels


def figure(results: Results) -> "Figure":
    """Errors, error bars and novelty along the path: a column per method, root mean squares over seeds."""
    groups = _by_method(results)
    picture = empty_figure(7, 7.5)
    grid = picture.subplots(len(PANELS), len(groups), sharex=True, sharey="row", squeeze=False)
    for column, (method, found) in enumerate(groups.items()):
        for axes, (title, curves) in zip(grid[:, column], PANELS.items(), strict=True):
            for name, label, style in curves:
                _draw(axes, [frames(result) for result in found], name, label, style)
            axes.axvspan(*found[0]["path"]["trained"], color="0.85", label="O-H distances of the training set")
            axes.set_yscale("log")
            axes.minorticks_off()
            if column == 0:
                axes.set_ylabel(title)
        grid[0, column].set_title(method)
        for axes, smallest in zip(grid[:, column], SMALLEST, strict=True):
            axes.set_ylim(bottom=smallest)
        grid[-1, column].axhline(OUTSIDE, color="C2", linestyle=":", label="outside the training set from here")
        grid[-1, column].set_xlabel("O-H distance, Å")
    labels = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    picture.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=2)
    return picture


def _draw(axes: "Axes", seeds: Sequence[list[dict[str, float]]], name: str, label: str, style: str) -> None:
    if name not in seeds[0][0]:
        return
    distances = [frame["oh_distance"] for frame in seeds[0]]
    values = [_root_mean_square([frame[name] for frame in same]) for same in zip(*seeds, strict=True)]
    known = [value or math.nan for value in values]  # the reference of the energies has no error
    axes.plot(distances, known, style, label=label, linewidth=1.5)
