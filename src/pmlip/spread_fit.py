"""Widths that suit errors best: by their CRPS, or by how often errors stay inside."""

import math

import numpy as np
from scipy.optimize import minimize_scalar
from torch import Tensor

from pmlip.scores import fair_crps, gaussian_crps

SMALLEST = 0.02  # no factor is smaller


LEVEL = 0.95


def best_factor(samples: Tensor, target: Tensor) -> float:
    """The factor f with the smallest CRPS of mean + f (sample - mean); samples (sample, ...), at least 3 of them.

    The mean of K samples is not the true one: it is off by spread / sqrt(K), and nearer to the samples. For a normal
    law the square of the factor about the true mean is (1 - 1/K)(1 - 2/K) f^2 - 1/K, which is what is returned.
    """
    count = len(samples)
    check_count(count)
    mean = samples.mean(0)
    around = samples - mean

    def crps(log_factor: float) -> float:
        return float(fair_crps(mean + float(np.exp(log_factor)) * around, target).mean())

    fitted = float(np.exp(minimize_scalar(crps, bounds=(-4, 4), method="bounded").x))
    return math.sqrt(max((1 - 1 / count) * (1 - 2 / count) * fitted**2 - 1 / count, SMALLEST**2))


def conformal_factor(scores: np.ndarray, system: np.ndarray, *, level: float = LEVEL) -> float | None:
    """q such that the score of an entry of a new structure is at most q with this probability, whatever the model.

    scores (entry,), such as |error| / sigma, of structures that are exchangeable with the new one; the entries of one
    structure may depend on each other. Each structure has weight 1 / (n + 1), spread over its entries, and the new one
    the last (Lee, Barber and Willett 2023). None: the level needs more structures than there are.
    """
    check_level(level)
    _, place, counts = np.unique(system, return_inverse=True, return_counts=True)
    order = np.argsort(scores)
    reached = np.cumsum(1 / counts[place[order]]) / (len(counts) + 1)
    # sums of fractions miss a level they reach exactly by a rounding error
    position = int(np.searchsorted(reached, level - 1e-12))
    return float(scores[order[position]]) if position < len(scores) else None


def check_count(samples: int) -> None:
    if samples < 3:
        raise ValueError(f"to fit a factor, at least 3 samples are needed, got samples={samples}")


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval lies between 0 and 1, got {level}")


def best_width(errors: np.ndarray, units: np.ndarray) -> float:
    """w with the smallest mean CRPS of N(0, (w unit)^2) at the errors."""
    if not errors.any():
        return 1e-9
    units = np.maximum(units, 1e-9)
    # of the sums, not of the ratios: one unit near zero must not decide
    scale = float(np.sqrt(np.mean(errors**2) / np.mean(units**2)))

    def crps(log_width: float) -> float:
        return float(gaussian_crps(errors, np.exp(log_width) * units).mean())

    fit = minimize_scalar(crps, bounds=(np.log(scale) - 7, np.log(scale) + 7), method="bounded")
    return float(np.exp(fit.x))
