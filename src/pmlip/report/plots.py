"""The figures of a report: each a function from arrays to a matplotlib figure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmlip import metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2")
POINTS = 4000  # largest number of points in a scatter plot
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#64748b",
    "axes.labelcolor": "#334155",
    "xtick.color": "#64748b",
    "ytick.color": "#64748b",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pmlip",  # makes files reproducible
}


def panel() -> tuple["Figure", Any]:
    """A figure with one pair of axes."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need: pip install 'pmlip[report]'") from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.9), layout="constrained")
        return figure, figure.add_subplot()


def parity(target: np.ndarray, mean: np.ndarray, spread: np.ndarray, *, unit: str, title: str) -> "Figure":
    """Predictions against reference values, coloured by the spread."""
    figure, axes = panel()
    shown = _some(len(target))
    ends = [min(target.min(), mean.min()), max(target.max(), mean.max())]
    axes.plot(ends, ends, color="#94a3b8", lw=1, zorder=0)
    points = axes.scatter(
        target[shown], mean[shown], c=spread[shown], cmap="viridis", s=8, alpha=0.7, linewidths=0, rasterized=True
    )
    figure.colorbar(points, ax=axes, label=f"spread ({unit})")
    axes.set(xlabel=f"reference ({unit})", ylabel=f"prediction ({unit})", title=title)
    return figure


def reliability(pits: Mapping[str, np.ndarray]) -> "Figure":
    """Observed against expected coverage of central intervals."""
    figure, axes = panel()
    levels = np.linspace(0, 1, 101)
    axes.plot([0, 1], [0, 1], color="#94a3b8", lw=1)
    for (name, pit), colour in zip(pits.items(), _cycle(), strict=False):
        axes.plot(levels, metrics.reliability(pit, levels), color=colour, lw=2, label=name)
    axes.text(0.97, 0.06, "overconfident below\nthe diagonal", ha="right", fontsize=8, color="#64748b")
    axes.set(xlabel="level of the interval", ylabel="observed coverage", title="Reliability")
    _legend(axes, pits)
    return figure


def ranks(histogram: np.ndarray) -> "Figure":
    """Histogram of the rank of the reference among the samples."""
    figure, axes = panel()
    count = len(histogram)
    groups = min(count, 17)
    joined = np.array([part.sum() * count / len(part) for part in np.array_split(histogram, groups)])
    axes.bar(np.linspace(0, 1, groups, endpoint=False), joined, width=0.92 / groups, align="edge", color=COLOURS[0])
    axes.axhline(1, color="#334155", lw=1, ls="--")
    axes.set(
        xlabel="rank of the reference among the samples",
        ylabel="frequency (calibrated: 1)",
        title="Rank histogram",
        xticks=[0, 1],
    )
    axes.set_xticklabels(["below all", "above all"])
    return figure


def spread_and_error(models: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> "Figure":
    """Error against spread: atoms of the first model, and root mean squares in bins of equal count for all models."""
    figure, axes = panel()
    spread, error = next(iter(models.values()))
    _cloud(axes, spread, error, COLOURS[0])
    for (name, pair), colour in zip(models.items(), _cycle(), strict=False):
        axes.plot(*_binned(*pair), "o-", color=colour, label=name, ms=4)
    ends = axes.get_xlim()
    axes.plot(ends, ends, color="#94a3b8", lw=1, zorder=0)
    axes.set(
        xlim=ends, xlabel="force spread per atom (eV/Å)", ylabel="force error per atom (eV/Å)", title="Error and spread"
    )
    _legend(axes, models)
    return figure


def force_and_error(force: np.ndarray, error: np.ndarray) -> "Figure":
    """Error against the norm of the force, as in `spread_and_error`."""
    figure, axes = panel()
    _cloud(axes, force, error, "#64748b")
    axes.plot(*_binned(force, error), "o-", color="#334155", ms=4)
    axes.set(xlabel="predicted |F| per atom (eV/Å)", ylabel="force error per atom (eV/Å)", title="Error and |F|")
    return figure


def _cloud(axes: Any, x: np.ndarray, y: np.ndarray, colour: str) -> None:
    shown = _some(len(y))
    axes.scatter(x[shown], y[shown], s=8, alpha=0.3, linewidths=0, color=colour, rasterized=True)
    axes.set(ylim=(0.7 * np.quantile(y[y > 0], 0.005), 1.4 * y.max()))
    _log(axes)


def sparsification(models: Mapping[str, tuple[np.ndarray, np.ndarray]], force: np.ndarray) -> "Figure":
    """RMSE of the remaining atoms when the most uncertain ones are removed."""
    figure, axes = panel()
    _, error = next(iter(models.values()))
    points = 50
    share = np.arange(points) / points
    for (name, (spread, own)), colour in zip(models.items(), _cycle(), strict=False):
        axes.plot(share, metrics.sparsification(own, spread, points=points)[0], color=colour, lw=2, label=name)
    by_force, by_error = metrics.sparsification(error, force, points=points)
    axes.plot(share, by_force, color="#64748b", lw=1.5, ls="--", label="by |F|")
    axes.plot(share, by_error, color="#94a3b8", lw=1.5, ls=":", label="by the true error")
    axes.set(
        xlabel="fraction of atoms removed, most uncertain first",
        ylabel="RMSE of the rest, relative to all",
        title="Sparsification",
        ylim=(0, 1.05),
    )
    axes.legend(fontsize=8)
    return figure


def inside_and_outside(
    measures: Mapping[str, np.ndarray], errors: Mapping[str, np.ndarray], *, novelty: bool = False
) -> "Figure":
    """Error against spread (or novelty) for each structure of several data sets."""
    figure, axes = panel()
    for (name, measure), colour in zip(measures.items(), _cycle(), strict=False):
        axes.scatter(measure, errors[name], s=14, alpha=0.55, linewidths=0, color=colour, label=name, rasterized=True)
    if novelty:
        axes.axvline(1, color="#94a3b8", lw=1)
    else:
        everything = np.concatenate([*measures.values(), *errors.values()])
        ends = [0.8 * everything[everything > 0].min(), 1.25 * everything.max()]
        axes.plot(ends, ends, color="#94a3b8", lw=1)
    _log(axes)
    axes.set(
        xlabel="novelty of the structure" if novelty else "RMS force spread per structure (eV/Å)",
        ylabel="force RMSE per structure (eV/Å)",
        title="In and out of distribution",
    )
    axes.legend(fontsize=8)
    return figure


def _log(axes: Any) -> None:
    """Make both axes logarithmic; axes that span less than a decade also get labels between powers of ten."""
    from matplotlib.ticker import LogFormatter

    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(0.7, 0.3)))


def _some(count: int) -> np.ndarray:
    """Indices of all points, or of a random subset of size POINTS."""
    return np.random.default_rng(0).permutation(count)[:POINTS]


def _binned(by: np.ndarray, error: np.ndarray, bins: int = 10) -> tuple[list[float], list[float]]:
    """Root mean squares of both arrays in bins of equal count, sorted by `by`."""
    parts = np.array_split(np.argsort(by), min(bins, len(by)))
    x, y = ([float(np.sqrt((values[part] ** 2).mean())) for part in parts] for values in (by, error))
    return x, y


def _cycle() -> Sequence[str]:
    return COLOURS * 4


def _legend(axes: Any, models: Mapping[str, Any]) -> None:
    if len(models) > 1:
        axes.legend(fontsize=8)
