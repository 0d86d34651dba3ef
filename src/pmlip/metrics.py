"""Metrics of calibration and ranking: K samples against labels, correct at finite K.

Arrays may be numpy or torch and of any shape; all entries have the same weight. `samples` is K, the number of samples
behind a mean and a spread s (standard deviation, ddof = 1). Use `math.inf` if the width is known exactly.

For K exchangeable Gaussian samples, the error of the sample mean, divided by

    sigma = sqrt(1 + 1/K) s

follows Student's t distribution with K - 1 degrees of freedom, not a normal distribution. All metrics here use this
sigma and this t distribution, so a calibrated model gets the same score at K = 2 as at K = 1000.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

Array = Any  # numpy array, torch tensor, or anything that np.asarray accepts


def predictive_sigma(spread: Array, samples: float) -> np.ndarray:
    """Return sigma = sqrt(1 + 1/K) s, the predicted standard deviation of the error of a K-sample mean."""
    if samples < 2:
        raise ValueError(f"a spread needs at least 2 samples, got samples={samples}")
    sigma = math.sqrt(1 + 1 / samples) * _array(spread)
    if (sigma < 0).any():
        raise ValueError("a spread must not be negative")
    return sigma


def spread_skill_ratio(mean: Array, spread: Array, target: Array, samples: float) -> float:
    """Return SSR = sqrt((K+1)/K) sqrt(mean s^2) / RMSE: 1 if calibrated, below 1 if overconfident (Fortin 2014)."""
    error, sigma = _error_and_sigma(mean, spread, target, samples)
    if not error.any():
        raise ValueError("all errors are zero, so the spread-skill ratio is undefined")
    return float(np.sqrt((sigma**2).mean() / (error**2).mean()))


def z_scores(mean: Array, spread: Array, target: Array, samples: float) -> np.ndarray:
    """Return errors / sigma, mapped from Student's t to the normal distribution: N(0, 1) if calibrated, for every K."""
    error, sigma = _error_and_positive_sigma(mean, spread, target, samples)
    z = error / sigma
    if math.isinf(samples):
        return z
    # use the upper tail of |z|: its probability is near 0, where floats are precise, not near 1
    tail = stats.t.sf(np.abs(z), samples - 1)
    return np.sign(z) * stats.norm.isf(np.maximum(tail, np.finfo(float).tiny))


def z_mean_square(mean: Array, spread: Array, target: Array, samples: float) -> float:
    """Return ZMS, the mean of the squared z-scores: 1 if calibrated, above 1 if overconfident."""
    return float((z_scores(mean, spread, target, samples) ** 2).mean())


def covered(mean: Array, spread: Array, target: Array, samples: float, *, level: float = 0.95) -> np.ndarray:
    """Return whether each target lies inside its central interval of probability `level`."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got level={level}")
    inside: np.ndarray = np.abs(z_scores(mean, spread, target, samples)) <= stats.norm.isf((1 - level) / 2)
    return inside


def coverage(mean: Array, spread: Array, target: Array, samples: float, *, level: float = 0.95) -> float:
    """Return the fraction of targets inside the central interval of probability `level`."""
    return float(covered(mean, spread, target, samples, level=level).mean())


def negative_log_likelihood(mean: Array, spread: Array, target: Array, samples: float) -> float:
    """Return the mean negative log density of the target: Student's t, K - 1 degrees of freedom, scale sigma."""
    error, sigma = _error_and_positive_sigma(mean, spread, target, samples)
    return float(-(stats.t.logpdf(error / sigma, samples - 1) - np.log(sigma)).mean())


def ranks(samples: Array, target: Array, *, seed: int = 0) -> np.ndarray:
    """Return the number of samples below each target, 0 to K; ties are broken at random.

    Uniform if calibrated, for any distribution of the samples.
    """
    x, y = _samples_and_target(samples, target)
    random = np.random.default_rng(seed)
    ties = (x == y).sum(0)
    return (x < y).sum(0) + random.integers(0, ties + 1)


def rank_histogram(samples: Array, target: Array, *, seed: int = 0) -> np.ndarray:
    """Return the fraction of targets at each rank, (K + 1,): flat if calibrated, U-shaped if overconfident."""
    rank = ranks(samples, target, seed=seed)
    return np.bincount(rank.ravel(), minlength=len(_array(samples)) + 1) / rank.size


def pit(samples: Array, target: Array, *, seed: int = 0) -> np.ndarray:
    """Return the probability integral transform (rank + u) / (K + 1), u uniform: uniform on [0, 1] if calibrated."""
    rank = ranks(samples, target, seed=seed)
    random = np.random.default_rng((seed, 1))
    return (rank + random.random(rank.shape)) / (len(_array(samples)) + 1)


def reliability(pit: Array, levels: Array) -> np.ndarray:
    """Return the fraction of targets inside the central interval of each level: equal to the level if calibrated."""
    distance = np.sort(np.abs(2 * _array(pit).ravel() - 1))
    return np.searchsorted(distance, _array(levels), side="right") / distance.size


def miscalibration_area(pit: Array) -> float:
    """Return the integral over all levels of |observed - expected coverage|: 0 if calibrated, at most 1/2."""
    levels = np.linspace(0, 1, 1001)
    return float(np.trapezoid(np.abs(reliability(pit, levels) - levels), levels))


def ence(mean: Array, spread: Array, target: Array, samples: float, *, bins: int = 10) -> float:
    """Return the expected normalised calibration error: mean of |RMV - RMSE| / RMV over equal-count bins of sigma.

    Even for a calibrated model, it grows about as sqrt(bins) and is larger at small K. Compare it with `ence_null`.
    """
    error, sigma = (values.ravel() for values in _error_and_positive_sigma(mean, spread, target, samples))
    if not 1 <= bins <= error.size:
        raise ValueError(f"{error.size} entries cannot be split into bins={bins}; pass 1 to {error.size} bins")
    order = np.argsort(sigma)
    widths = [np.sqrt((part**2).mean()) for part in np.array_split(sigma[order], bins)]
    errors = [np.sqrt((part**2).mean()) for part in np.array_split(error[order], bins)]
    return float(np.mean(np.abs(np.subtract(widths, errors)) / widths))


def ence_null(samples: Array, *, bins: int = 10, repeats: int = 20, seed: int = 0) -> np.ndarray:
    """Return the ENCE of a calibrated model with the spread of `samples`, (repeats,).

    One sample serves as the target, the other K - 1 as the model. Compare it with the ENCE of K - 1 samples: at small K
    that is larger than the ENCE of K samples.
    """
    x = _array(samples)
    if len(x) < 3:
        raise ValueError(f"ence_null needs at least 3 samples, got samples={len(x)}")
    random = np.random.default_rng(seed)
    values = []
    for _ in range(repeats):
        chosen = random.integers(0, len(x), (1, *x.shape[1:]))
        target = np.take_along_axis(x, chosen, 0)[0]
        others = np.where(np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == chosen, np.nan, x)
        mean, spread = np.nanmean(others, 0), np.nanstd(others, 0, ddof=1)
        values.append(ence(mean, spread, target, len(x) - 1, bins=bins))
    return np.array(values)


def spearman(a: Array, b: Array) -> float:
    """Return the rank correlation, for example of squared error and variance; NaN if one array is constant.

    At finite K, noise in the variance lowers the correlation: compare methods at equal K only.
    """
    ranks = _ranked(a, b)
    return float(np.corrcoef(ranks)[0, 1]) if np.ptp(ranks, axis=1).all() else math.nan


def partial_spearman(a: Array, b: Array, given: Array) -> float:
    """Return the rank correlation of a and b after removing their dependence on `given`.

    Large forces have large errors. With given=|F|, the result measures what the spread adds to the size of the force.
    """
    ab, ag, bg = spearman(a, b), spearman(a, given), spearman(b, given)
    left = (1 - ag**2) * (1 - bg**2)
    # undefined if `given` explains a or b completely
    return float((ab - ag * bg) / math.sqrt(left)) if left > 1e-12 else math.nan


def effective_directions(samples: Array, system: Array) -> float:
    """Return the number of directions in which samples (sample, atom, component) vary, averaged over systems that vary.

    NaN if no system varies. See `effective_directions_per_system`.
    """
    return mean_of_positive(effective_directions_per_system(samples, system))


def effective_directions_per_system(samples: Array, system: Array) -> np.ndarray:
    """Return the number of directions in which the samples of each system vary, (system,); 0 if they are equal.

    It is (sum of the variances along the principal axes)^2 / (sum of their squares). If it is 1, all samples lie on a
    line: one pattern sets the spreads of all atoms, and they are wrong wherever the pattern is small.
    """
    values, owner = _array(samples), _array(system)
    deviations = values - values.mean(0)
    found = []
    for number in np.unique(owner):
        part = deviations[:, owner == number].reshape(len(deviations), -1)
        gram = part @ part.T
        total = np.trace(gram)
        found.append(total**2 / np.square(gram).sum() if total > 0 else 0.0)
    return np.array(found)


def mean_of_positive(values: np.ndarray) -> float:
    """Return the mean of the values above zero; NaN if there are none."""
    positive = values[values > 0]
    return float(positive.mean()) if positive.size else math.nan


def auroc(inside: Array, outside: Array) -> float:
    """Return the probability that a value of `outside` exceeds a value of `inside` (ties count half).

    1/2 means that the two sets cannot be told apart.
    """
    a, b = _array(inside).ravel(), _array(outside).ravel()
    if not a.size or not b.size:
        raise ValueError(f"inside and outside must not be empty, got {a.size} and {b.size} values")
    rank = stats.rankdata(np.concatenate([a, b]))[a.size :]
    return float((rank.sum() - b.size * (b.size + 1) / 2) / (a.size * b.size))


def sparsification(error: Array, spread: Array, *, points: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Return two RMSE curves: entries removed by largest spread, and by largest error.

    Each curve is (points,): the RMSE of the remaining entries, relative to the RMSE of all entries, after removing the
    fractions 0, 1/points, ...
    """
    error, spread = _array(error).ravel(), _array(spread).ravel()
    _same_shape(error=error, spread=spread)
    squares = error**2
    # the order of entries with equal spread is arbitrary: use the mean of their squared errors for each
    _, group = np.unique(spread, return_inverse=True)
    expected = (np.bincount(group, squares) / np.bincount(group))[group]
    kept = np.maximum(1, np.ceil(error.size * (1 - np.arange(points) / points)).astype(int)) - 1

    def curve(values: np.ndarray) -> np.ndarray:
        running = np.cumsum(values) / np.arange(1, error.size + 1)
        return np.sqrt(running[kept] / squares.mean())

    return curve(expected[np.argsort(spread)]), curve(np.sort(squares))


def ause(error: Array, spread: Array, *, points: int = 50) -> float:
    """Return the area between the two sparsification curves: 0 if the spread sorts the errors perfectly."""
    by_spread, by_error = sparsification(error, spread, points=points)
    return float((by_spread - by_error).mean())


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def bootstrap(
    metric: Callable[..., float],
    *arrays: Array,
    system: Array,
    level: float = 0.95,
    resamples: int = 200,
    seed: int = 0,
) -> Interval:
    """Return metric(*arrays) with a percentile interval from a bootstrap over structures.

    Arrays are (entry, ...), and `system` (entry,) is the structure of each entry. Entries of one structure are
    correlated, so resampling single entries would make the interval too narrow. Resamples for which the metric is NaN
    are ignored.
    """
    index = _array(system, dtype=int)
    values: list[np.ndarray] = [_array(array) for array in arrays]
    for value in values:
        if len(value) != len(index):
            raise ValueError(
                f"an array has {len(value)} entries, but system has {len(index)}; they must have the same length"
            )
    members = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    members = [member for member in members if member.size]
    random = np.random.default_rng(seed)
    scores = []
    for _ in range(resamples):
        chosen = np.concatenate([members[i] for i in random.integers(0, len(members), len(members))])
        scores.append(metric(*(array[chosen] for array in values)))
    known = [score for score in scores if not math.isnan(score)] or [math.nan]
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return Interval(metric(*values), float(low), float(high))


def _array(values: Array, dtype: type = float) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    array: np.ndarray = np.asarray(values, dtype=dtype)
    if array.size == 0:
        raise ValueError("an input array is empty; metrics need at least one entry")
    if not np.isfinite(array).all():
        raise ValueError("an input array holds NaN or infinite values; remove entries without a label first")
    return array


def _same_shape(**arrays: np.ndarray) -> None:
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"shapes differ: {shapes}")


def _error_and_sigma(mean: Array, spread: Array, target: Array, samples: float) -> tuple[np.ndarray, np.ndarray]:
    center, sigma, label = _array(mean), predictive_sigma(spread, samples), _array(target)
    _same_shape(mean=center, spread=sigma, target=label)
    return label - center, sigma


def _error_and_positive_sigma(
    mean: Array, spread: Array, target: Array, samples: float
) -> tuple[np.ndarray, np.ndarray]:
    error, sigma = _error_and_sigma(mean, spread, target, samples)
    if not (sigma > 0).all():
        raise ValueError(
            f"{(sigma == 0).sum()} of {sigma.size} entries have a spread of zero, and errors cannot be divided by it; "
            "leave out entries that symmetry fixes"
        )
    return error, sigma


def _samples_and_target(samples: Array, target: Array) -> tuple[np.ndarray, np.ndarray]:
    x, y = _array(samples), _array(target)
    if x.shape[1:] != y.shape:
        raise ValueError(f"samples {x.shape} must be (sample, *target shape), but target has shape {y.shape}")
    return x, y


def _ranked(*arrays: Array) -> list[np.ndarray]:
    flat = [_array(array).ravel() for array in arrays]
    _same_shape(**{f"array {i}": array for i, array in enumerate(flat)})
    return [stats.rankdata(array) for array in flat]
