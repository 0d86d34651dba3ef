"""What a report is about: models on files of structures, and their scores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import stats

from pmlip import metrics
from pmlip.evaluation import Evaluation
from pmlip.samples import SMALLEST_SPREAD
from pmlip.scores import fair_crps
from pmlip.spread_fit import best_factor


@dataclass(frozen=True)
class Judged:
    """One model on one file of structures."""

    model: str
    data: str
    evaluation: Evaluation

    @cached_property
    def forces(self) -> "Forces":
        return Forces.of(self.evaluation)


@dataclass(frozen=True)
class Forces:
    """What the figures need of the forces, as arrays."""

    samples: np.ndarray  # (sample, atom, 3)
    target: np.ndarray  # (atom, 3)
    mean: np.ndarray  # of the samples
    expected: np.ndarray  # over all noise: what a calculator gives
    spread: np.ndarray
    system: np.ndarray  # (atom,)

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Forces":
        drawn, target = evaluation.drawn, evaluation.target.forces.double().numpy()
        samples, system = drawn.forces.double().numpy(), drawn.system.numpy()
        mean, spread = samples.mean(0), samples.std(0, ddof=1)
        expected = evaluation.expected.forces.double().numpy()
        # perfect crystals, whose forces symmetry fixes, say nothing
        kept = np.isin(system, system[(spread > SMALLEST_SPREAD).any(-1)])
        return cls(samples[:, kept], target[kept], mean[kept], expected[kept], spread[kept], system[kept])

    @cached_property
    def atom_error(self) -> np.ndarray:
        return np.linalg.norm(self.mean - self.target, axis=-1)

    @cached_property
    def atom_spread(self) -> np.ndarray:
        return np.linalg.norm(self.spread, axis=-1)

    @cached_property
    def atom_force(self) -> np.ndarray:
        return np.linalg.norm(self.mean, axis=-1)

    @cached_property
    def moving(self) -> np.ndarray:
        """Components with a spread; symmetry fixes the others."""
        moving: np.ndarray = self.spread > SMALLEST_SPREAD
        return moving

    @cached_property
    def crps(self) -> np.ndarray:
        """Of each component, (atom, 3)."""
        return fair_crps(torch.from_numpy(self.samples), torch.from_numpy(self.target)).numpy()

    @cached_property
    def covered(self) -> np.ndarray:
        """Whether each component lies in its 95 % interval, (atom, 3); one without a spread counts as inside."""
        inside = np.ones(self.target.shape)
        moving = self.moving
        z = metrics.z_scores(self.mean[moving], self.spread[moving], self.target[moving], len(self.samples))
        inside[moving] = np.abs(z) <= stats.norm.isf(0.025)
        return inside

    @cached_property
    def covering_factor(self) -> float:
        """What the spread would have to be multiplied with for 95 % of the components to lie in their intervals."""
        count, moving = len(self.samples), self.moving
        z = np.abs(self.mean - self.target)[moving] / metrics.predictive_sigma(self.spread[moving], count)
        about_mean = float(np.quantile(z, 0.95) / stats.t.isf(0.025, count - 1))
        # about the true mean, as `best_factor` is: the mean of K samples is off by spread / sqrt(K) itself
        return float(np.sqrt(max((1 + 1 / count) * about_mean**2 - 1 / count, 1e-4)))

    @cached_property
    def best_factor(self) -> float | None:
        """What the spread should be multiplied with; None with fewer than three samples."""
        if len(self.samples) < 3:
            return None
        return best_factor(torch.from_numpy(self.samples), torch.from_numpy(self.target))


def score_row(judged: Judged) -> dict[str, Any]:
    """The scores of the forces with 95 % intervals from resampling structures; of the energies without."""
    forces, count = judged.forces, judged.evaluation.samples
    error = np.abs(forces.mean - forces.target)
    entries: dict[str, tuple[Callable[..., float], *tuple[np.ndarray, ...]]] = {
        "MAE, meV/Å": (lambda e: 1e3 * e.mean(), np.abs(forces.expected - forces.target)),
        "CRPS, meV/Å": (lambda c: 1e3 * c.mean(), forces.crps),
        "SSR": (lambda e, s: float(np.sqrt((1 + 1 / count) * (s**2).mean() / (e**2).mean())), error, forces.spread),
        "in the 95 % interval": (lambda inside: 100 * inside.mean(), forces.covered),
        "Spearman, atoms": (metrics.spearman, forces.atom_error, forces.atom_spread),
        "of |F|": (metrics.spearman, forces.atom_error, forces.atom_force),
    }
    cells: dict[str, tuple[str, str | None, str | None]] = {}
    for name, (metric, *arrays) in entries.items():
        interval = metrics.bootstrap(metric, *arrays, system=forces.system)
        digits = 0 if "%" in name else 1 if "meV" in name else 2
        unit = " %" if "%" in name else ""
        value, low, high = (f"{number:.{digits}f}{unit}" if np.isfinite(number) else None for number in interval)
        cells[name] = (value or "", low, high)
    energy = judged.evaluation.scores.get("energy", {})
    titled = {"energy: MAE, meV/atom": ("mae_expected", 1e3, 1), "SSR of energies": ("ssr", 1, 2)}
    for name, (key, scale, digits) in titled.items():
        if key in energy:
            cells[name] = (f"{scale * energy[key]:.{digits}f}", None, None)
    shown, given = len(np.unique(forces.system)), judged.evaluation.structures
    of_given = "" if shown == given else f" of {given} (in the others symmetry fixes the forces)"
    size = f"{shown} structures{of_given}, {len(forces.target)} atoms, K = {count}"
    return {"model": judged.model, "data": judged.data, "size": size, "cells": cells}
