"""Fit the width of an error distribution to observed errors, by CRPS or by coverage."""

import math

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

from pmlip.scores import fair_crps, fair_crps_of_scaled, gaussian_crps

SMALLEST = 0.02  # lower bound of a fitted factor
LARGEST_POWER = 2.0
LEVEL = 0.95  # default coverage of an interval


def best_factor(samples: Tensor, target: Tensor, *, mean: Tensor | None = None) -> float:
    """Return the factor on the spread that minimises the CRPS, corrected for finite K; samples (sample, ...), K >= 3.

    mean: the mean over all noise, if it is known; the fit then minimises `fair_crps_of_scaled`.

    Otherwise, the fit minimises the CRPS of mean + f (sample - mean) over f. The sample mean differs from the true mean
    by about spread / sqrt(K) and lies closer to the samples. For normal samples, the squared factor about the true mean
    is (1 - 1/K)(1 - 2/K) f^2 - 1/K; its square root is returned.
    """
    count = len(samples)
    check_count(count)
    own = samples.mean(0)
    around = samples - own

    def crps(log_factor: float) -> float:
        factor = float(np.exp(log_factor))
        if mean is not None:
            return float(fair_crps_of_scaled(samples, target, factor, mean=mean).mean())
        return float(fair_crps(own + factor * around, target).mean())

    fitted = float(np.exp(minimize_scalar(crps, bounds=(-4, 4), method="bounded").x))
    if mean is not None:
        return fitted
    return math.sqrt(max((1 - 1 / count) * (1 - 2 / count) * fitted**2 - 1 / count, SMALLEST**2))


def conformal_factor(scores: np.ndarray, system: np.ndarray, *, level: float = LEVEL) -> float | None:
    """Return q such that the score of an entry of a new structure is at most q with probability `level`, for any model.

    scores (entry,), such as |error| / sigma, come from structures that are exchangeable with the new structure; entries
    of one structure may be correlated. Each of the n structures has weight 1 / (n + 1), shared by its entries; the new
    structure has the remaining weight (Lee, Barber and Willett 2023). Returns None if n is too small for the level.
    """
    check_level(level)
    _, place, counts = np.unique(system, return_inverse=True, return_counts=True)
    order = np.argsort(scores)
    reached = np.cumsum(1 / counts[place[order]]) / (len(counts) + 1)
    # a sum that equals the level exactly may be below it by a rounding error
    position = int(np.searchsorted(reached, level - 1e-12))
    return float(scores[order[position]]) if position < len(scores) else None


def check_count(samples: int) -> None:
    if samples < 3:
        raise ValueError(f"to fit a factor, at least 3 samples are needed, got samples={samples}")


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got level={level}")


def best_width(errors: np.ndarray, units: np.ndarray) -> float:
    """Return the w that minimises the mean CRPS of N(0, (w unit)^2) at the errors."""
    if not errors.any():
        return 1e-9
    units = np.maximum(units, 1e-9)
    # ratio of means, not mean of ratios: a unit near zero would dominate
    scale = float(np.sqrt(np.mean(errors**2) / np.mean(units**2)))

    def crps(log_width: float) -> float:
        return float(gaussian_crps(errors, np.exp(log_width) * units).mean())

    fit = minimize_scalar(crps, bounds=(np.log(scale) - 7, np.log(scale) + 7), method="bounded")
    return float(np.exp(fit.x))


def best_power(errors: np.ndarray, units: np.ndarray) -> tuple[float, float]:
    """Return a and b that minimise the mean CRPS of N(0, (exp(a) unit^b)^2) at the errors; b lies in [0, 2]."""
    positive = np.maximum(units, 1e-9)
    start = (math.log(max(float(np.sqrt(np.mean(errors**2))), 1e-9)), 1.0)

    def crps(point: np.ndarray) -> float:
        return float(gaussian_crps(errors, math.exp(point[0]) * positive ** np.clip(point[1], 0, LARGEST_POWER)).mean())

    found = minimize(crps, start, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-9}).x
    return float(found[0]), float(np.clip(found[1], 0, LARGEST_POWER))
