"""The table of metrics, used by `evaluate`, the terminal, JSON, the report and the benchmarks.

To add a metric, add one entry to METRICS: a function of arrays of `score_columns`, and where to show its value.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from ase.units import GPa

from pmlip import metrics
from pmlip.score_columns import Columns, Rows
from pmlip.scores import gaussian_crps
from pmlip.structures import LABELS


@dataclass(frozen=True)
class Unit:
    """The unit in which values are shown: shown value = stored value times scale."""

    name: str
    scale: float = 1.0


UNITS = {"energy": Unit("meV/atom", 1e3), "forces": Unit("meV/Å", 1e3), "stress": Unit("GPa", 1 / GPa)}


@dataclass(frozen=True)
class TableColumn:
    """A score in the result files and tables of the benchmarks."""

    name: str
    title: str
    digits: int = 2


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One score of one output: a function of arrays, and where to show its value."""

    name: str  # in `Evaluation.scores` and in JSON
    title: str  # in tables; `heading` adds the kind of rows
    rows: Literal["entries", "varying_entries", "atoms", "structures"]  # of `Columns`
    columns: tuple[str, ...]  # names of the arrays that the function takes
    function: Callable[..., float]  # NaN where the metric is not defined
    unit: Literal["output", "%", ""] = ""  # "output": the unit of the output
    min_rows: int = 1  # with fewer rows, the metric is not defined
    outputs: tuple[str, ...] = LABELS  # outputs with this metric
    terminal: bool = True
    report: tuple[str, ...] = ()  # outputs whose value the report shows
    benchmark: Mapping[str, TableColumn] = field(default_factory=dict)  # output -> name in a benchmark's files

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.rows}" if self.rows in ("atoms", "structures") else self.title

    def value(self, columns: Columns) -> float:
        """The value of the metric; NaN if it is not defined."""
        found = self._arrays(columns)
        return self.function(*found[1]) if found else math.nan

    def interval(self, columns: Columns) -> metrics.Interval:
        """The value with a 95 % interval from resampling whole structures."""
        found = self._arrays(columns)
        if not found:
            return metrics.Interval(math.nan, math.nan, math.nan)
        rows, arrays = found
        return metrics.bootstrap(self.function, *arrays, system=rows.system)

    def unit_for(self, output: str) -> Unit:
        return UNITS[output] if self.unit == "output" else Unit("%", 100.0) if self.unit == "%" else Unit("")

    def shown(self, value: float, output: str) -> str:
        """The value as text, in the unit of the tables."""
        scaled = self.unit_for(output).scale * value
        if self.unit == "output":
            return f"{scaled:.0f}" if abs(scaled) >= 999.5 else f"{scaled:.3g}"
        return f"{scaled:.0f} %" if self.unit == "%" else f"{scaled:.2f}"

    def _arrays(self, columns: Columns) -> tuple[Rows, list[np.ndarray]] | None:
        rows: Rows = getattr(columns, self.rows)
        if (
            columns.output not in self.outputs
            or len(rows) < self.min_rows
            or not all(name in rows for name in self.columns)
        ):
            return None
        return rows, [rows[name] for name in self.columns]


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _mean_absolute(errors: np.ndarray) -> float:
    return float(np.abs(errors).mean())


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


def _spread_skill_ratio(errors: np.ndarray, sigma: np.ndarray) -> float:
    """RMS sigma over RMS error; NaN if all errors are zero, as for forces that symmetry fixes."""
    return _root_mean_square(sigma) / _root_mean_square(errors) if errors.any() else math.nan


def _mean_spearman(errors: np.ndarray, spreads: np.ndarray) -> float:
    """Mean of the Spearman correlations of matching columns, for arrays (row, column)."""
    return float(np.mean([metrics.spearman(error, spread) for error, spread in zip(errors.T, spreads.T, strict=True)]))


def _mean_gaussian_crps(errors: np.ndarray, sigma: np.ndarray) -> float:
    return float(gaussian_crps(errors, sigma).mean()) if np.isfinite(sigma).all() else math.nan


METRICS: tuple[Metric, ...] = (
    Metric(
        name="mae",
        title="MAE of the sample mean",
        rows="entries",
        columns=("error",),
        function=_mean_absolute,
        unit="output",
        terminal=False,
        benchmark={"forces": TableColumn("force_mae", "F-MAE", 1), "energy": TableColumn("energy_mae", "E-MAE")},
    ),
    Metric(  # of the mean over all noise, the prediction of the calculator
        name="mae_expected",
        title="MAE",
        rows="entries",
        columns=("expected_error",),
        function=_mean_absolute,
        unit="output",
        report=("forces", "energy"),
        benchmark={
            "forces": TableColumn("force_mae_expected", "expected", 1),
            "energy": TableColumn("energy_mae_expected", "expected"),
        },
    ),
    Metric(
        name="mae_without_noise",
        title="MAE without noise",
        rows="entries",
        columns=("point_error",),
        function=_mean_absolute,
        unit="output",
        benchmark={
            "forces": TableColumn("force_mae_without_noise", "z = 0", 1),
            "energy": TableColumn("energy_mae_without_noise", "z = 0"),
        },
    ),
    Metric(
        name="rmse",
        title="RMSE of the sample mean",
        rows="entries",
        columns=("error",),
        function=_root_mean_square,
        unit="output",
    ),
    Metric(
        name="crps",
        title="CRPS",
        rows="entries",
        columns=("crps",),
        function=_mean,
        unit="output",
        report=("forces",),
        benchmark={"forces": TableColumn("force_crps", "F-CRPS", 1), "energy": TableColumn("energy_crps", "E-CRPS")},
    ),
    Metric(
        name="spread",
        title="spread",
        rows="entries",
        columns=("spread",),
        function=_root_mean_square,
        unit="output",
        benchmark={"forces": TableColumn("force_spread", "F-spread", 1)},
    ),
    Metric(
        name="ssr",
        title="SSR",
        rows="entries",
        columns=("error", "sigma"),
        function=_spread_skill_ratio,
        report=("forces", "energy"),
        benchmark={"forces": TableColumn("ssr", "SSR"), "energy": TableColumn("energy_ssr", "E-SSR")},
    ),
    Metric(
        name="coverage_95",
        title="in 95 % interval",
        rows="varying_entries",
        columns=("covered",),
        function=_mean,
        unit="%",
        report=("forces",),
    ),
    Metric(
        name="spearman_structure",
        title="Spearman",
        rows="structures",
        columns=("error", "spread"),
        function=metrics.spearman,
        min_rows=3,
        outputs=("forces",),
        benchmark={"forces": TableColumn("spearman", "Spearman")},
    ),
    Metric(
        name="spearman_structure_of_force",
        title="|F| alone",
        rows="structures",
        columns=("error", "force"),
        function=metrics.spearman,
        min_rows=3,
        outputs=("forces",),
        benchmark={"forces": TableColumn("spearman_of_force", "of the force")},
    ),
    Metric(
        name="spearman_structure_given_force",
        title="beyond |F|",
        rows="structures",
        columns=("error", "spread", "force"),
        function=metrics.partial_spearman,
        min_rows=3,
        outputs=("forces",),
        benchmark={"forces": TableColumn("spearman_given_force", "given the force")},
    ),
    Metric(
        name="spearman_structure_of_novelty",
        title="novelty",
        rows="structures",
        columns=("error", "novelty"),
        function=metrics.spearman,
        min_rows=3,
        outputs=("forces",),
    ),
    Metric(
        name="spearman_atom",
        title="Spearman",
        rows="atoms",
        columns=("error", "spread"),
        function=metrics.spearman,
        min_rows=3,
        outputs=("forces",),
        report=("forces",),
        benchmark={"forces": TableColumn("spearman_atom", "atoms")},
    ),
    Metric(
        name="spearman_atom_of_force",
        title="|F| alone",
        rows="atoms",
        columns=("error", "force"),
        function=metrics.spearman,
        min_rows=3,
        outputs=("forces",),
        report=("forces",),
        benchmark={"forces": TableColumn("spearman_atom_of_force", "of the force")},
    ),
    Metric(
        name="spearman_atom_given_force",
        title="beyond |F|",
        rows="atoms",
        columns=("error", "spread", "force"),
        function=metrics.partial_spearman,
        min_rows=3,
        outputs=("forces",),
        benchmark={"forces": TableColumn("spearman_atom_given_force", "given the force")},
    ),
    Metric(
        name="spearman_atom_of_novelty",
        title="novelty",
        rows="atoms",
        columns=("error", "novelty"),
        function=metrics.spearman,
        min_rows=3,
        outputs=("forces",),
        report=("forces",),
    ),
    Metric(
        name="crps_one_pass",
        title="CRPS of one pass",
        rows="entries",
        columns=("point_error", "one_pass_sigma"),
        function=_mean_gaussian_crps,
        unit="output",
        outputs=("forces",),
        report=("forces",),
    ),
    Metric(
        name="ssr_one_pass",
        title="SSR of one pass",
        rows="entries",
        columns=("point_error", "one_pass_sigma"),
        function=_spread_skill_ratio,
        outputs=("forces",),
        report=("forces",),
    ),
    # Correlation of a perfectly calibrated model: each sample in turn is the label. It stays below 1 because errors are
    # random.
    Metric(
        name="spearman_structure_at_best",
        title="best possible",
        rows="structures",
        columns=("swapped_square_error", "swapped_variance"),
        function=_mean_spearman,
        min_rows=3,
        outputs=("forces",),
        benchmark={"forces": TableColumn("spearman_at_best", "at best")},
    ),
    Metric(
        name="directions",
        title="directions",
        rows="structures",
        columns=("directions",),
        function=metrics.mean_of_positive,
        outputs=("forces",),
        terminal=False,
        benchmark={"forces": TableColumn("directions", "directions", 1)},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One score that compares two sets of structures: a function of the same column of both."""

    name: str  # in JSON and in the files of the benchmarks
    title: str
    short: str  # title in the tables of the benchmarks
    column: Literal["error", "spread", "force", "structure_novelty"]  # one value per structure
    function: Callable[[np.ndarray, np.ndarray], float]  # arguments: values in and out of distribution
    digits: int = 2


def _ratio(inside: np.ndarray, outside: np.ndarray) -> float:
    return float(np.sqrt((outside**2).mean() / (inside**2).mean()))


COMPARISONS: tuple[Comparison, ...] = (
    Comparison(
        name="auroc_spread", title="AUROC of the spread", short="AUROC", column="spread", function=metrics.auroc
    ),
    Comparison(
        name="auroc_novelty",
        title="AUROC of novelty",
        short="of novelty",
        column="structure_novelty",
        function=metrics.auroc,
    ),
    Comparison(
        name="auroc_force", title="AUROC of |F| alone", short="of the force", column="force", function=metrics.auroc
    ),
    Comparison(
        name="auroc_error", title="AUROC of the error", short="of the error", column="error", function=metrics.auroc
    ),
    Comparison(
        name="spread_ratio", title="spread ratio", short="spread, times", column="spread", function=_ratio, digits=1
    ),
    Comparison(
        name="error_ratio", title="error ratio", short="error, times", column="error", function=_ratio, digits=1
    ),
)


def metric(name: str) -> Metric:
    return next(one for one in METRICS if one.name == name)


def scores_of(columns: Columns) -> dict[str, float]:
    """The defined metrics of one output, by name."""
    values = {one.name: one.value(columns) for one in METRICS if columns.output in one.outputs}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def benchmark_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Scores under their names in the benchmark files. scores: output -> metric -> value."""
    return {
        column.name: scores[output][one.name]
        for one in METRICS
        for output, column in one.benchmark.items()
        if one.name in scores.get(output, {})
    }


def benchmark_columns() -> dict[str, tuple[TableColumn, float]]:
    """Column and scale of every score in the benchmark files, by name."""
    found = {
        column.name: (column, one.unit_for(output).scale) for one in METRICS for output, column in one.benchmark.items()
    }
    return found | {one.name: (TableColumn(one.name, one.short, one.digits), 1.0) for one in COMPARISONS}
