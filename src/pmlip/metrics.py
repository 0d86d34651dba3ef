"""Is the spread right? Numbers for K samples against labels, correct at finite K.

Arrays may be numpy or torch and of any shape; entries are treated alike. `samples` is K, the number of
samples behind a mean and a spread (ddof = 1); `math.inf` stands for a width that is known exactly.

For K exchangeable Gaussian samples the error of the sample mean, divided by

    sigma = sqrt(1 + 1/K) s

follows Student's t with K - 1 degrees of freedom, not a normal law. Every metric here that needs a width uses that
sigma, and every one that needs a law uses that t: a calibrated model scores as calibrated at K = 2 as at 1000.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

Array = Any  # numpy array, torch tensor, or what numpy makes an array of


def predictive_sigma(spread: Array, samples: float) -> np.ndarray:
    """sigma = sqrt(1 + 1/K) s: the width of the error of a mean of K samples with spread s."""
    if samples < 2:
        raise ValueError(f"a spread needs at least 2 samples, got samples={samples}")
    sigma = math.sqrt(1 + 1 / samples) * _array(spread)
    if (sigma < 0).any():
        raise ValueError("a spread must not be negative")
    return sigma


def spread_skill_ratio(mean: Array, spread: Array, target: Array, samples: float) -> float:
    """SSR = sqrt((K+1)/K) sqrt(mean s^2) / RMSE: 1 if calibrated, below 1 if overconfident (Fortin 2014)."""
    error, sigma = _error_and_sigma(mean, spread, target, samples)
    if not error.any():
        raise ValueError("all errors are zero, so the spread has no skill to be compared with")
    return float(np.sqrt((sigma**2).mean() / (error**2).mean()))


def z_scores(mean: Array, spread: Array, target: Array, samples: float) -> np.ndarray:
    """Errors in units of sigma, carried from Student's t to the normal law: N(0, 1) if calibrated, for every K."""
    error, sigma = _error_and_positive_sigma(mean, spread, target, samples)
    z = error / sigma
    if math.isinf(samples):
        return z
    # through the tail next to zero, where the probability does not round to 1
    tail = stats.t.sf(np.abs(z), samples - 1)
    return np.sign(z) * stats.norm.isf(np.maximum(tail, np.finfo(float).tiny))


def z_mean_square(mean: Array, spread: Array, target: Array, samples: float) -> float:
    """ZMS, the mean of the squared z-scores: 1 if calibrated, above 1 if overconfident."""
    return float((z_scores(mean, spread, target, samples) ** 2).mean())


def covered(mean: Array, spread: Array, target: Array, samples: float, *, level: float = 0.95) -> np.ndarray:
    """Whether each target lies inside its central interval of probability `level`."""
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval lies between 0 and 1, got {level}")
    inside: np.ndarray = np.abs(z_scores(mean, spread, target, samples)) <= stats.norm.isf((1 - level) / 2)
    return inside


def coverage(mean: Array, spread: Array, target: Array, samples: float, *, level: float = 0.95) -> float:
    """The share of targets inside the central interval of probability `level`."""
    return float(covered(mean, spread, target, samples, level=level).mean())


def negative_log_likelihood(mean: Array, spread: Array, target: Array, samples: float) -> float:
    """Mean negative log density of the target under Student's t with K - 1 degrees of freedom and scale sigma."""
    error, sigma = _error_and_positive_sigma(mean, spread, target, samples)
    return float(-(stats.t.logpdf(error / sigma, samples - 1) - np.log(sigma)).mean())


def ranks(samples: Array, target: Array, *, seed: int = 0) -> np.ndarray:
    """How many of the K samples lie below the target, 0 to K; ties are broken at random.

    Uniform if calibrated, whatever the law of the samples.
    """
    x, y = _samples_and_target(samples, target)
    random = np.random.default_rng(seed)
    ties = (x == y).sum(0)
    return (x < y).sum(0) + random.integers(0, ties + 1)


def rank_histogram(samples: Array, target: Array, *, seed: int = 0) -> np.ndarray:
    """The share of targets at each rank, (K + 1,): flat if calibrated, U-shaped if overconfident."""
    rank = ranks(samples, target, seed=seed)
    return np.bincount(rank.ravel(), minlength=len(_array(samples)) + 1) / rank.size


def pit(samples: Array, target: Array, *, seed: int = 0) -> np.ndarray:
    """Probability integral transform (rank + u) / (K + 1) with u uniform: uniform on [0, 1] if calibrated."""
    rank = ranks(samples, target, seed=seed)
    random = np.random.default_rng((seed, 1))
    return (rank + random.random(rank.shape)) / (len(_array(samples)) + 1)


def reliability(pit: Array, levels: Array) -> np.ndarray:
    """The share of targets inside the central interval of each level: equal to the level if calibrated."""
    distance = np.sort(np.abs(2 * _array(pit).ravel() - 1))
    return np.searchsorted(distance, _array(levels), side="right") / distance.size


def miscalibration_area(pit: Array) -> float:
    """Integral over all levels of |observed - expected coverage|: 0 if calibrated, at most 1/2."""
    levels = np.linspace(0, 1, 1001)
    return float(np.trapezoid(np.abs(reliability(pit, levels) - levels), levels))


def ence(mean: Array, spread: Array, target: Array, samples: float, *, bins: int = 10) -> float:
    """Expected normalised calibration error: mean over equal-count bins of sigma of |RMV - RMSE| / RMV.

    Grows about as sqrt(bins), and at small K, even when calibrated: it means something only beside `ence_null`.
    """
    error, sigma = (values.ravel() for values in _error_and_positive_sigma(mean, spread, target, samples))
    if not 1 <= bins <= error.size:
        raise ValueError(f"{error.size} entries cannot be put into {bins} bins; give 1 to {error.size}")
    order = np.argsort(sigma)
    widths = [np.sqrt((part**2).mean()) for part in np.array_split(sigma[order], bins)]
    errors = [np.sqrt((part**2).mean()) for part in np.array_split(error[order], bins)]
    return float(np.mean(np.abs(np.subtract(widths, errors)) / widths))


def ence_null(samples: Array, *, bins: int = 10, repeats: int = 20, seed: int = 0) -> np.ndarray:
    """ENCE of a calibrated model with this spread, (repeats,): one sample plays the target, K - 1 the model.

    Compare it with the ENCE of K - 1 samples, which is larger than that of K where K is small.
    """
    x = _array(samples)
    if len(x) < 3:
        raise ValueError(f"the null of the ENCE needs at least 3 samples, got samples={len(x)}")
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
    """Rank correlation, for instance of squared error and variance; NaN where one of them is constant.

    Attenuated at finite K by the noise of the variance: compare methods at equal K only.
    """
    ranks = _ranked(a, b)
    return float(np.corrcoef(ranks)[0, 1]) if np.ptp(ranks, axis=1).all() else math.nan


def partial_spearman(a: Array, b: Array, given: Array) -> float:
    """Rank correlation of a and b that their common dependence on `given` does not explain.

    Large forces have large errors: with given=|F| this says what a spread knows beyond that.
    """
    ab, ag, bg = spearman(a, b), spearman(a, given), spearman(b, given)
    left = (1 - ag**2) * (1 - bg**2)
    # where `given` explains one of them wholly, nothing is left to correlate
    return float((ab - ag * bg) / math.sqrt(left)) if left > 1e-12 else math.nan


def effective_directions(samples: Array, system: Array) -> float:
    """Number of directions in which samples (sample, atom, component) vary, averaged over the systems that vary.

    NaN if no system varies. See `effective_directions_per_system`.
    """
    return mean_of_positive(effective_directions_per_system(samples, system))


def effective_directions_per_system(samples: Array, system: Array) -> np.ndarray:
    """Number of directions in which the samples of each system vary about their mean, (system,); 0 if they are equal.

    (sum of the variances along the principal axes)^2 / (sum of their squares): 1 if all samples lie on a line. The
    widths of all atoms then come from one pattern, and are wrong wherever that pattern happens to be small.
    """
    values, of = _array(samples), _array(system)
    around = values - values.mean(0)
    found = []
    for number in np.unique(of):
        part = around[:, of == number].reshape(len(around), -1)
        gram = part @ part.T
        total = np.trace(gram)
        found.append(total**2 / np.square(gram).sum() if total > 0 else 0.0)
    return np.array(found)


def mean_of_positive(values: np.ndarray) -> float:
    """Mean of the values above zero; NaN if there are none."""
    positive = values[values > 0]
    return float(positive.mean()) if positive.size else math.nan


def auroc(inside: Array, outside: Array) -> float:
    """Chance that a value from `outside` exceeds one from `inside` (ties count half): 1/2 if they do not differ."""
    a, b = _array(inside).ravel(), _array(outside).ravel()
    if not a.size or not b.size:
        raise ValueError(f"both sets need values, got {a.size} inside and {b.size} outside")
    rank = stats.rankdata(np.concatenate([a, b]))[a.size :]
    return float((rank.sum() - b.size * (b.size + 1) / 2) / (a.size * b.size))


def sparsification(error: Array, spread: Array, *, points: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """RMSE of what remains when the entries with the largest spread, or the largest error, are taken away.

    Both curves (points,), relative to the RMSE of all, for shares 0, 1/points, ... taken away.
    """
    error, spread = _array(error).ravel(), _array(spread).ravel()
    _same_shape(error=error, spread=spread)
    squares = error**2
    # entries of equal spread could come in any order: each counts as the mean of them
    _, group = np.unique(spread, return_inverse=True)
    expected = (np.bincount(group, squares) / np.bincount(group))[group]
    kept = np.maximum(1, np.ceil(error.size * (1 - np.arange(points) / points)).astype(int)) - 1

    def curve(values: np.ndarray) -> np.ndarray:
        running = np.cumsum(values) / np.arange(1, error.size + 1)
        return np.sqrt(running[kept] / squares.mean())

    return curve(expected[np.argsort(spread)]), curve(np.sort(squares))


def ause(error: Array, spread: Array, *, points: int = 50) -> float:
    """Area between the two sparsification curves: 0 if the spread sorts the errors perfectly."""
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
    """metric(*arrays) with a percentile interval from resampling whole structures.

    The arrays are (entry, ...) with `system` (entry,) naming the structure of each: entries of one structure are
    correlated, so resampling entries would make the interval too narrow. Resamples that have no such metric (NaN) do
    not count.
    """
    index = _array(system, dtype=int)
    values: list[np.ndarray] = [_array(array) for array in arrays]
    for value in values:
        if len(value) != len(index):
            raise ValueError(f"an array of {len(value)} entries, but the system index has {len(index)}")
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
        raise ValueError("a metric of no entries: the array is empty")
    if not np.isfinite(array).all():
        raise ValueError("a metric was given NaN or infinite values; remove entries without a label first")
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
            f"{(sigma == 0).sum()} of {sigma.size} entries have a spread of zero, so their errors have no unit; "
            "leave out entries that symmetry fixes"
        )
    return error, sigma


def _samples_and_target(samples: Array, target: Array) -> tuple[np.ndarray, np.ndarray]:
    x, y = _array(samples), _array(target)
    if x.shape[1:] != y.shape:
        raise ValueError(f"samples {x.shape} must be (sample, *target shape), and the target has {y.shape}")
    return x, y


def _ranked(*arrays: Array) -> list[np.ndarray]:
    flat = [_array(array).ravel() for array in arrays]
    _same_shape(**{f"array {i}": array for i, array in enumerate(flat)})
    return [stats.rankdata(array) for array in flat]
