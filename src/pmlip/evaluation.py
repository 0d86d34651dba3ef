"""Scores of a model and its uncertainty on structures with labels."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from ase import Atoms
from torch import Tensor

from pmlip import score_table
from pmlip.methods.base import Method
from pmlip.novelty import Novelty
from pmlip.samples import Outputs, Samples
from pmlip.score_columns import Columns, rankable
from pmlip.scores import fair_crps_of_scaled
from pmlip.structures import LABELS
from pmlip.structures.atoms import Progress, as_structures
from pmlip.structures.labels import labels


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Samples and labels of structures, and the scores of the samples in eV and Å; energies are per atom."""

    drawn: Samples
    expected: Outputs  # estimate of the mean over all noise
    point: Outputs  # the prediction without noise
    target: Outputs
    seconds: float = 0.0  # time to draw the samples
    listed: Sequence[Atoms] = ()  # the structures
    crps: Mapping[str, Tensor] | None = None  # CRPS per entry; None: the fair CRPS of the samples
    novelty: Novelty | None = None  # None: the model does not know its training set

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
        given: dict[str, Any] = {"expected": self.expected, "point": self.point, "target": self.target}
        given["novelty"] = self.novelty
        return {
            name: Columns(name, self.drawn, **given, crps=None if self.crps is None else self.crps[name])
            for name in LABELS
            if name in self.drawn
        }

    @cached_property
    def scores(self) -> dict[str, dict[str, float]]:
        """Output -> metric -> value; outputs without labels and undefined metrics are left out."""
        return {name: score_table.scores_of(columns) for name, columns in self.columns.items() if columns.labelled}

    @property
    def error(self) -> np.ndarray:
        """Root mean square force error of each structure; NaN where labels are missing."""
        return self.columns["forces"].structure_error

    @property
    def spread(self) -> np.ndarray:
        """Root mean square force spread of each structure; 0 if the model has no spread."""
        return self.columns["forces"].structure_spread

    @property
    def structure_novelty(self) -> np.ndarray:
        """Novelty of each structure."""
        assert self.novelty is not None
        return rankable(self.novelty.structure.numpy())

    @property
    def outside(self) -> int | None:
        """Number of structures outside the training set; None if the model does not know its training set."""
        return None if self.novelty is None else int(self.novelty.outside.sum())

    @property
    def force(self) -> np.ndarray:
        """Root mean square of each structure's predicted forces."""
        return self.columns["forces"].structure_force

    def subset(self, samples: int) -> "Evaluation":
        """The evaluation of the first samples only; their mean replaces the mean over all noise."""
        drawn = self.drawn.subset(samples)
        return replace(self, drawn=drawn, expected=drawn.mean, crps=None)

    def scaled(self, factor: float, *, energy: float | None = None) -> "Evaluation":
        """The evaluation with the spread scaled about the sample mean; energy: a separate factor for energies."""
        factors = dict.fromkeys(self.columns, factor) | ({} if energy is None else {"energy": energy})
        if self.samples < 2 and any(value != 1 for value in factors.values()):
            raise ValueError(f"a spread needs at least 2 samples to be scaled, got samples={self.samples}")
        # the fair CRPS is biased for samples scaled about their own mean
        crps = {
            name: fair_crps_of_scaled(columns.samples, columns.label, factors[name])
            for name, columns in self.columns.items()
        }
        drawn = self.drawn.scaled(factor, energy=energy)
        return replace(self, drawn=drawn, crps=crps)


def evaluate(
    model: Method,
    structures: Sequence[Atoms],
    *,
    samples: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Score samples, their mean, the mean over all noise (`Method.sample_with_mean`), and the noise-free prediction.

    Entries without a label do not count. Scores of the spread need at least 2 samples. The spread of the energies is
    the reported one, which includes `Calibration.energy_factor`.
    """
    listed = as_structures(structures)
    target = labels(listed)
    if not any(bool(values.isfinite().any()) for values in target.values()):
        raise ValueError("the structures carry no labels to compare with; note that Atoms.copy() drops labels")
    count = model.fixed_samples or samples
    began = time.perf_counter()
    drawn, expected = model.sample_with_mean(listed, samples=count, seed=seed, progress=progress)
    seconds = time.perf_counter() - began
    if model.calibration is not None and model.calibration.energy_factor != 1:
        drawn = drawn.scaled(1.0, energy=model.calibration.energy_factor, mean=expected)
    novelty = model.novelty(listed) if model.training_features else None
    return Evaluation(drawn, expected, model.predict(listed), target, seconds, listed, novelty=novelty)


def compare(inside: Evaluation, outside: Evaluation) -> dict[str, float]:
    """Scores that compare in- and out-of-distribution structures: do spread and novelty rise with the error?"""
    known = {
        "spread": bool(inside.spread.any()),
        "error": bool(np.isfinite([*inside.error, *outside.error]).all()),
        "structure_novelty": inside.novelty is not None and outside.novelty is not None,
    }
    return {
        one.name: one.function(getattr(inside, one.column), getattr(outside, one.column))
        for one in score_table.COMPARISONS
        if known.get(one.column, True)
    }


def rank_together(parts: Sequence[Evaluation]) -> dict[str, float]:
    """Spearman correlations of the error with the spread, and with |F| alone, over the structures of several sets."""
    result = {}
    for name in ("spearman_structure", "spearman_structure_of_force"):
        metric = score_table.metric(name)
        columns = [np.concatenate([getattr(part, column) for part in parts]) for column in metric.columns]
        result[metric.benchmark["forces"].name] = metric.function(*columns)
    return result


def as_record(evaluation: Evaluation) -> dict[str, Any]:
    """Scores and sizes as plain values, for a result file."""
    return {
        "samples": evaluation.samples,
        "structures": evaluation.structures,
        "seconds": round(evaluation.seconds, 2),
        **({} if evaluation.outside is None else {"outside_the_training_set": evaluation.outside}),
        **evaluation.scores,
    }
