"""How good a model and its uncertainty are on structures with labels."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from ase import Atoms
from torch import Tensor

from pmlip import score_table
from pmlip.methods.base import Method, Progress
from pmlip.samples import Outputs, Samples
from pmlip.score_columns import Columns
from pmlip.scores import fair_crps_of_scaled
from pmlip.structures import LABELS
from pmlip.structures.atoms import as_structures
from pmlip.structures.labels import labels


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Samples and labels of structures, and their scores in eV and Å; energies per atom."""

    drawn: Samples
    expected: Outputs  # the mean over all noise, as well as it can be estimated
    point: Outputs  # the prediction without noise
    target: Outputs
    seconds: float = 0.0  # for the K samples
    listed: Sequence[Atoms] = ()  # the structures
    crps: Mapping[str, Tensor] | None = None  # per entry, if it is not the fair CRPS of the samples

    def __repr__(self) -> str:
        return f"Evaluation(samples={self.samples}, structures={self.structures}, scores={self.scores})"

    @property
    def samples(self) -> int:
        return self.drawn.count

    @property
    def structures(self) -> int:
        return self.drawn.systems

    @cached_property
    def columns(self) -> dict[str, Columns]:
        """Output -> the per-row arrays behind its scores."""
        given = {"expected": self.expected, "point": self.point, "target": self.target}
        return {
            name: Columns(name, self.drawn, **given, crps=None if self.crps is None else self.crps[name])
            for name in LABELS
            if name in self.drawn
        }

    @cached_property
    def scores(self) -> dict[str, dict[str, float]]:
        """Output -> metric -> value, for outputs with labels and metrics that are defined."""
        return {name: score_table.scores_of(columns) for name, columns in self.columns.items() if columns.labelled}

    @property
    def error(self) -> np.ndarray:
        """Root mean square force error of each structure; NaN where labels are missing."""
        return self.columns["forces"].structure_error

    @property
    def spread(self) -> np.ndarray:
        """Root mean square force spread of each structure; 0 if there is none."""
        return self.columns["forces"].structure_spread

    @property
    def force(self) -> np.ndarray:
        """Root mean square of each structure's predicted forces."""
        return self.columns["forces"].structure_force

    def subset(self, samples: int) -> "Evaluation":
        """The evaluation with the first samples only, and their mean as the expected one."""
        drawn = self.drawn.subset(samples)
        return Evaluation(drawn, drawn.mean, self.point, self.target, self.seconds, self.listed)

    def scaled(self, factor: float, *, energy: float | None = None) -> "Evaluation":
        """The evaluation with the spread scaled about the mean; energy: a separate factor for the energies."""
        factors = dict.fromkeys(self.columns, factor) | ({} if energy is None else {"energy": energy})
        # samples scaled about their own mean have no fair score
        crps = {
            name: fair_crps_of_scaled(columns.samples, columns.label, factors[name])
            for name, columns in self.columns.items()
        }
        drawn = self.drawn.scaled(factor, energy=energy)
        return Evaluation(drawn, self.expected, self.point, self.target, self.seconds, self.listed, crps)


def evaluate(
    model: Method,
    structures: Sequence[Atoms],
    *,
    samples: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Scores of the samples, of their mean, of the mean over all noise (`Method.sample_with_mean`), and without noise.

    Entries without a label do not count. One sample has no spread to score.
    """
    listed = as_structures(structures)
    target = labels(listed)
    if not any(bool(values.isfinite().any()) for values in target.values()):
        raise ValueError("the structures carry no labels to compare with; Atoms.copy() leaves labels behind")
    count = model.fixed_samples or samples
    began = time.perf_counter()
    drawn, expected = model.sample_with_mean(listed, samples=count, seed=seed, progress=progress)
    seconds = time.perf_counter() - began
    return Evaluation(drawn, expected, model.predict(listed), target, seconds, listed)


def compare(inside: Evaluation, outside: Evaluation) -> dict[str, float]:
    """Does the spread rise where the error does? In- against out-of-distribution structures."""
    return {
        one.name: one.function(getattr(inside, one.column), getattr(outside, one.column))
        for one in score_table.COMPARISONS
    }


def rank_together(parts: Sequence[Evaluation]) -> dict[str, float]:
    """How well the spread, and |F| alone, rank the structures of several sets by their error (Spearman)."""
    result = {}
    for name in ("spearman_structure", "spearman_structure_of_force"):
        metric = score_table.metric(name)
        columns = [np.concatenate([getattr(part, column) for part in parts]) for column in metric.columns]
        result[metric.benchmark["forces"].name] = metric.function(*columns)
    return result


def as_record(evaluation: Evaluation) -> dict[str, Any]:
    """What a result file holds."""
    return {
        "samples": evaluation.samples,
        "structures": evaluation.structures,
        "seconds": round(evaluation.seconds, 2),
        **evaluation.scores,
    }
