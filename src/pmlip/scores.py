"""Proper scores of K samples against a target. They return one value per entry, without reduction.

The sample axis comes first. Each score is a mean error minus a spread term. For the CRPS, with sorted samples
x_(1) <= ... <= x_(K),

    mean_k |x_k - y| - c * sum_{i<j} |x_i - x_j|,      sum_{i<j} |x_i - x_j| = sum_k (2k - K - 1) x_(k)

where c = 1 / (K (K-1)) gives the fair (unbiased) estimator and c = 1 / K^2 the standard estimator. Sorting takes
O(K log K) time and O(K) memory. For tied samples, the gradient equals the gradient of the double sum with sign(0) = 0,
so the spread term does not separate them.
"""

import math
from typing import Any

import numpy as np
import torch
from scipy.special import erf
from torch import Tensor


def fair_crps(samples: Tensor, target: Tensor) -> Tensor:
    """Return the fair CRPS, unbiased for any K: mean_k |x_k - y| - 1/(2K(K-1)) sum_{i!=j} |x_i - x_j|.

    samples (sample, ...), target (...). For one sample it is the absolute error.
    """
    return almost_fair_crps(samples, target, fairness=1.0)


def fair_crps_of_scaled(samples: Tensor, target: Tensor, factor: float, *, mean: Tensor | None = None) -> Tensor:
    """Return the fair CRPS of a distribution with the same mean and `factor` times the spread of the samples.

    mean: the true mean mu, if it is known.

    Samples are scaled about the sample mean m, not about the unknown true mean mu, and m - mu has variance s^2 / K (s:
    spread). For the error term, samples move to m + g (x - m) with g^2 (1 - 1/K) = f^2 - 1/K, where f is the factor:
    their variance about mu is then f^2 s^2. With a known mean, they move to mu + g (x - m) with g^2 (1 - 1/K) = f^2. In
    the spread term, the distance of each pair is multiplied by f.
    """
    if factor == 1 and mean is None:
        return fair_crps(samples, target)
    count, own = len(samples), samples.mean(0)
    centre, known = (own, 1 / count) if mean is None else (mean, 0.0)
    stretch = math.sqrt(max(factor**2 - known, 0.0) / (1 - 1 / count))
    moved = centre + stretch * (samples - own)
    apart = (samples - target).abs().mean(0) - fair_crps(samples, target)
    return (moved - target).abs().mean(0) - factor * apart


def standard_crps(samples: Tensor, target: Tensor) -> Tensor:
    """Return the CRPS of the empirical distribution: mean_k |x_k - y| - 1/(2K^2) sum_{i!=j} |x_i - x_j|."""
    return almost_fair_crps(samples, target, fairness=0.0)


def almost_fair_crps(samples: Tensor, target: Tensor, *, fairness: float = 0.95) -> Tensor:
    """Return fairness * fair + (1 - fairness) * standard CRPS (Lang et al. 2024).

    With fairness = 1, the score does not depend on one sample while all other samples equal the target. With
    fairness > 1, the score is not proper and rewards a larger spread. Use that only as a loss: it counteracts
    overfitting, which fits the spread to training errors and makes it too small on new data.
    """
    _check(samples, target)
    dtype = torch.promote_types(torch.promote_types(samples.dtype, target.dtype), torch.float32)
    return _CRPS.apply(samples.to(dtype), target.to(dtype), _spread_factor(len(samples), fairness))


def energy_score(samples: Tensor, target: Tensor, *, norm: float = 2, fairness: float = 1.0) -> Tensor:
    """Return the energy score of vectors along the last axis: mean_k ||x_k - y|| - c * sum_{i<j} ||x_i - x_j||.

    With norm=2 it is invariant to rotation; with norm=1 it is the sum of the CRPS of the components. Takes O(K^2) time
    and, without gradients, O(K) memory.
    """
    _check(samples, target)
    if target.dim() == 0:
        raise ValueError("the energy score needs vectors: samples must be (sample, ..., component), got (sample,)")
    count = len(samples)
    distance = torch.linalg.vector_norm(samples - target, ord=norm, dim=-1).mean(0)
    pairs = torch.zeros_like(distance)
    for first in range(count - 1):
        pairs = pairs + torch.linalg.vector_norm(samples[first + 1 :] - samples[first], ord=norm, dim=-1).sum(0)
    return distance - _spread_factor(count, fairness) * pairs


def gaussian_crps(errors: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the CRPS of N(0, width^2) at each error (Gneiting 2005)."""
    z = errors / np.maximum(widths, 1e-12)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    crps: np.ndarray = widths * (z * erf(z / np.sqrt(2)) + 2 * density - 1 / np.sqrt(np.pi))
    return crps


def _check(samples: Tensor, target: Tensor) -> None:
    if samples.dim() == 0 or len(samples) == 0:
        raise ValueError(f"scores need at least one sample, got samples of shape {tuple(samples.shape)}")
    if samples.shape[1:] != target.shape:
        raise ValueError(
            f"samples {tuple(samples.shape)} must be (sample, ...) with the target's shape "
            f"{tuple(target.shape)} after the sample axis"
        )


def _spread_factor(count: int, fairness: float) -> float:
    if not fairness >= 0:
        raise ValueError(f"fairness must not be negative (0: standard, 1: fair), got {fairness}")
    if count == 1:
        return 0.0
    return fairness / (count * (count - 1)) + (1 - fairness) / count**2


class _CRPS(torch.autograd.Function):
    """CRPS with a custom gradient. The score is piecewise linear, so the forward pass also computes the gradient.

    With the place p_i = (number of smaller samples) - (number of larger samples), the spread term is sum_i p_i x_i and
    its gradient is p_i. Places come from pairwise comparison for few samples and from sorting for many.
    """

    @staticmethod
    def forward(ctx: Any, samples: Tensor, target: Tensor, factor: float) -> Tensor:
        count, entries = len(samples), target.numel()
        x, y = samples.reshape(count, entries), target.reshape(entries)
        few = count <= _FEW
        axis = 0 if few else 1  # sample axis inside a block: sorting is faster along a contiguous axis
        needs_gradient = any(ctx.needs_input_grad)
        score, for_target = torch.empty_like(y), torch.empty_like(y)
        slopes = x.new_empty((count, entries) if few else (entries, count)) if needs_gradient else None
        # work in blocks that fit into the CPU cache
        block = max(1, _BLOCK // count) if x.device.type == "cpu" else max(1, entries)
        for start in range(0, entries, block):
            here = slice(start, start + block)
            part = x[:, here] if few else x[:, here].T.contiguous()
            # The places sum to zero, so an offset cancels. Subtracting the target avoids loss of precision.
            error = part - y[here].unsqueeze(axis)
            if few or slopes is not None:
                places = _places_by_comparing(part) if few else _places_by_sorting(part)
                spread = (places * error).sum(axis)
            else:
                spread = _sort(error) @ _places_in_order(count, like=error)
            if slopes is not None:
                slope = error.sign().div_(count)
                for_target[here] = -slope.sum(axis)
                (slopes[:, here] if few else slopes[here]).copy_(slope.sub_(places, alpha=factor))
            score[here] = error.abs_().mean(axis).sub_(spread, alpha=factor)
        if slopes is not None:
            gradient = slopes if few else slopes.T
            ctx.save_for_backward(gradient.reshape(samples.shape), for_target.view(target.shape))
        return score.view(target.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        for_samples, for_target = ctx.saved_tensors
        needs_samples, needs_target, _ = ctx.needs_input_grad
        return (
            gradient * for_samples if needs_samples else None,
            gradient * for_target if needs_target else None,
            None,
        )


_FEW = 16  # up to this many samples, comparing is faster than sorting
_BLOCK = 1 << 17  # numbers per block: half a megabyte in single precision


def _places_by_comparing(samples: Tensor) -> Tensor:
    """Return the places of samples (sample, entry) by pairwise comparison."""
    places = torch.zeros_like(samples)
    for step in range(1, len(samples)):
        larger = (samples[step:] - samples[:-step]).sign_()
        places[step:] += larger
        places[:-step] -= larger
    return places


def _places_in_order(count: int, *, like: Tensor) -> Tensor:
    """Return the places of sorted samples without ties: 2k - K - 1 for k = 1 ... K."""
    return torch.arange(1 - count, count, 2, dtype=like.dtype, device=like.device)


def _places_by_sorting(rows: Tensor) -> Tensor:
    """Return the places of samples (entry, sample) by sorting; tied samples share one place."""
    ordered, order = _argsort(rows)
    count = ordered.shape[1]
    places = _places_in_order(count, like=ordered).expand_as(ordered)
    tied_rows = (ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero()[:, 0]
    if len(tied_rows):
        tied = ordered[tied_rows]
        changes = tied[:, 1:] != tied[:, :-1]
        edge = torch.ones_like(changes[:, :1])
        index = torch.arange(count, device=ordered.device).expand_as(tied)
        first = torch.where(torch.cat([edge, changes], 1), index, 0).cummax(1).values
        last = torch.where(torch.cat([changes, edge], 1), index, count).flip(1).cummin(1).values.flip(1)
        places = places.index_put((tied_rows,), (first + last + 1 - count).to(ordered.dtype))
    return torch.empty_like(ordered).scatter_(1, order, places)


def _sort(rows: Tensor) -> Tensor:
    # numpy's vectorised sort is up to ten times faster than torch's on a CPU
    if rows.device.type == "cpu":
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1))
    return rows.sort(-1).values


def _argsort(rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.device.type == "cpu":
        order = np.argsort(rows.numpy(), axis=-1)
        return torch.from_numpy(np.take_along_axis(rows.numpy(), order, -1)), torch.from_numpy(order)
    return rows.sort(-1)
