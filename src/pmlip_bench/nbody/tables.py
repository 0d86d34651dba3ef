"""Tables and figure of the N-body benchmark: Table 1 and Figure 1 of the paper, an overview and details."""

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pmlip_bench.publish import Results, draw_score, empty_figure, over_seeds, with_deviation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# order in tables and figures
METHODS = ("egnn", "ensemble", "blip", "mc-dropout", "p-egnn", "p-ensemble", "p-blip")

# The paper: mean and standard deviation of MSE x 1e3, CRPS x 1e2, SSR on the paper's test set.
PAPER: dict[tuple[str, int], tuple[tuple[float, float] | None, ...]] = {
    ("egnn", 3000): ((6.83, 0.31), None, None),
    ("ensemble", 3000): ((5.84, 0.13), (1.88, 0.10), (0.58, 0.02)),
    ("blip", 1000): ((7.39, 0.75), (2.86, 0.37), (0.40, 0.04)),
    ("blip", 3000): ((6.13, 0.75), (2.35, 0.12), (0.42, 0.03)),
    ("blip", 10000): ((4.57, 0.41), (2.00, 0.19), (0.42, 0.02)),
    ("p-egnn", 1000): ((7.89, 0.60), (2.31, 0.16), (0.75, 0.08)),
    ("p-egnn", 3000): ((6.09, 0.38), (1.76, 0.08), (0.83, 0.12)),
    ("p-egnn", 10000): ((4.19, 0.17), (1.36, 0.07), (0.88, 0.05)),
}
SCALES = {"mse": 1e3, "crps": 1e2, "ssr": 1.0}


def summary(results: Results) -> list[dict[str, Any]]:
    """Rows with mean and standard deviation over seeds for each method and size, and the paper's values."""
    rows = []
    for method, size in _in_order(results):
        found = [result for cell, result in results.items() if (cell.method, cell.size) == (method, size)]
        row: dict[str, Any] = {"method": method, "size": size, "seeds": len(found), "samples": found[0]["samples"]}
        for position, name in enumerate(SCALES):
            for key, place in ((name, "test"), (f"{name}_as_trained", "test_as_trained")):
                values = [result[place][name] for result in found if name in result[place]]
                if values:
                    row[key] = over_seeds(values)
            published = PAPER.get((method, size), (None, None, None))[position]
            if published is not None:
                row[f"paper_{name}"] = {
                    key: value / SCALES[name] for key, value in zip(("mean", "std"), published, strict=True)
                }
        row["training_passes"] = statistics.mean(result["training"]["passes"] for result in found)
        row["training_seconds"] = statistics.mean(result["training"]["seconds"] for result in found)
        row["prediction_seconds"] = statistics.mean(result["prediction"]["seconds"] for result in found)
        rows.append(row)
    return rows


def _in_order(results: Results) -> list[tuple[str, int]]:
    """Method and size of each row, in the order of a table."""
    return sorted({(cell.method, cell.size) for cell in results}, key=lambda key: (key[1], METHODS.index(key[0])))


def table(results: Results) -> str:
    """Table 1 as Markdown."""
    lines = [
        "| n | method | K | MSE x 1e3 | paper | CRPS x 1e2 | as trained | paper | SSR | as trained | paper "
        "| training: passes, seconds | prediction: seconds | seeds |",
        "|---" * 14 + "|",
    ]

    def cell(row: dict[str, Any], name: str, key: str) -> str:
        value = row.get(key)
        return "" if value is None else with_deviation(value, SCALES[name])

    for row in summary(results):
        columns = [(name, key) for name in SCALES for key in (name, f"{name}_as_trained", f"paper_{name}")]
        # scaling does not change the mean, so there is only one MSE
        scores = [cell(row, name, key) for name, key in columns if key != "mse_as_trained"]
        cost = f"{row['training_passes']:.1e}, {row['training_seconds']:.0f}"
        cells = [row["size"], row["method"], row["samples"], *scores, cost, f"{row['prediction_seconds']:.0f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['seeds']} |")
    return "\n".join(lines) + "\n"


def overview(results: Results) -> str:
    """Markdown table of CRPS and spread-skill ratio: one row per method, one column per size."""
    rows = {(row["method"], row["size"]): row for row in summary(results)}
    sizes = sorted({size for _, size in rows})
    lines = [f"| CRPS x 1e2 (SSR) | {' | '.join(f'n = {size}' for size in sizes)} |", "|---" * (len(sizes) + 1) + "|"]

    def line(title: str, prefix: str, method: str) -> str:
        cells = []
        for size in sizes:
            row = rows.get((method, size), {})
            crps, ssr = row.get(f"{prefix}crps"), row.get(f"{prefix}ssr")
            ratio = f" ({ssr['mean']:.2f})" if ssr else ""
            cells.append(with_deviation(crps, 1e2) + ratio if crps else "")
        return f"| {title} | {' | '.join(cells)} |" if any(cells) else ""

    for method in METHODS:
        lines += [line(method, "", method), line(f"{method}, paper", "paper_", method)]
    return "\n".join(filter(None, lines)) + "\n"


def details(results: Results) -> str:
    """Markdown table of scores with 3 samples, without noise and out of distribution, and of equivariance errors."""
    lines = [
        "| n | method | CRPS x 1e2 of 3 samples | MSE x 1e3 without noise | out of distribution: MSE x 1e3 "
        "| CRPS x 1e2 | SSR | error of a sample when turned | when relabelled |",
        "|---" * 9 + "|",
    ]

    def mean(found: list[dict[str, Any]], place: str, name: str, form: str = ".3g") -> str:
        values = [result[place][name] for result in found if name in result.get(place, {})]
        return f"{SCALES.get(name, 1.0) * statistics.mean(values):{form}}" if values else ""

    for method, size in _in_order(results):
        found = [result for cell, result in results.items() if (cell.method, cell.size) == (method, size)]
        of_three = "test" if found[0]["samples"] == 3 else "test_three_samples"
        scores = [mean(found, of_three, "crps"), mean(found, "test_at_zero_noise", "mse")]
        scores += [mean(found, "out_of_distribution", name) for name in SCALES]
        scores += [mean(found, "equivariance_error", name, ".0e") for name in ("rotation", "relabelling")]
        lines.append(f"| {size} | {method} | {' | '.join(scores)} |")
    return "\n".join(lines) + "\n"


def ablations(results: Results, tuned: Results) -> str:
    """Markdown table of ablations: test scores as trained, each method first without changes, for the same seeds."""
    lines = ["| n | method | MSE x 1e3 | CRPS x 1e2 | SSR | training: passes | seeds |", "|---" * 7 + "|"]
    groups: dict[tuple[int, str], dict[str, list[dict[str, Any]]]] = {}
    for cell, result in results.items():
        method, _, change = cell.method.partition("+")
        group = groups.setdefault((cell.size, method), {"": []})
        if (same := replace(cell, method=method)) in tuned and tuned[same] not in group[""]:
            group[""].append(tuned[same])
        group.setdefault(change, []).append(result)
    for (size, method), group in sorted(groups.items()):
        for change, found in group.items():
            if not found:
                continue
            scores = [
                with_deviation(over_seeds([scale * result["test_as_trained"][score] for result in found]))
                if score in found[0]["test_as_trained"]
                else ""
                for score, scale in SCALES.items()
            ]
            passes = statistics.mean(result["training"]["passes"] for result in found)
            name = f"{method}, {change}" if change else method
            lines.append(f"| {size} | {name} | {' | '.join(scores)} | {passes:.1e} | {len(found)} |")
    return "\n".join(lines) + "\n"


def figure(results: Results) -> "Figure":
    """Figure 1: the three scores against the size of the training set; the paper's values are dashed."""
    rows = summary(results)
    picture = empty_figure(12, 3.6)
    for position, (name, scale) in enumerate(SCALES.items()):
        axes = picture.add_subplot(1, 3, position + 1)
        draw_score(axes, rows, METHODS, name, scale=scale)
        title = {"mse": "MSE × 1e3", "crps": "CRPS × 1e2"}.get(name, "SSR")
        axes.set(xlabel="training trajectories", title=title)
        if position == 1:  # all methods have this score
            picture.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return picture
