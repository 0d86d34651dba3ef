"""Proper scores of K samples against a target: one value per entry, no reduction. Samples come first.

A sample mean and a spread term make up each of them; for the CRPS, with x_(1) <= ... <= x_(K),

    mean_k |x_k - y| - c * sum_{i<j} |x_i - x_j|,      sum_{i<j} |x_i - x_j| = sum_k (2k - K - 1) x_(k)

where c = 1 / (K (K-1)) is the fair (unbiased) estimator and c = 1 / K^2 the standard one. Sorting makes
that O(K log K) time and O(K) memory. Where samples tie, the gradient is that of the double sum: the spread
term pulls none of them apart.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def fair_crps(samples: Tensor, target: Tensor) -> Tensor:
    """Fair CRPS, unbiased for any K: mean_k |x_k - y| - 1/(2K(K-1)) sum_{i!=j} |x_i - x_j|.

    samples (sample, ...), target (...). With one sample, the absolute error.
    """
    return almost_fair_crps(samples, target, fairness=1.0)


def standard_crps(samples: Tensor, target: Tensor) -> Tensor:
    """CRPS of the empirical distribution: mean_k |x_k - y| - 1/(2K^2) sum_{i!=j} |x_i - x_j|."""
    return almost_fair_crps(samples, target, fairness=0.0)


def almost_fair_crps(samples: Tensor, target: Tensor, *, fairness: float = 0.95) -> Tensor:
    """fairness * fair + (1 - fairness) * standard (Lang et al. 2024).

    The fair score alone is flat in the position of one sample while all others hit the target.
    """
    _check(samples, target)
    dtype = torch.promote_types(torch.promote_types(samples.dtype, target.dtype), torch.float32)
    return _SortedCRPS.apply(samples.to(dtype), target.to(dtype), _spread_factor(len(samples), fairness))


def energy_score(samples: Tensor, target: Tensor, *, norm: float = 2, fairness: float = 1.0) -> Tensor:
    """Energy score of vectors along the last axis: mean_k ||x_k - y|| - c * sum_{i<j} ||x_i - x_j||.

    With the Euclidean norm it does not depend on the frame; with norm=1 it is the sum of the CRPS of the
    components. Takes O(K^2) time and, without gradients, O(K) memory.
    """
    _check(samples, target)
    count = len(samples)
    distance = torch.linalg.vector_norm(samples - target, ord=norm, dim=-1).mean(0)
    pairs = torch.zeros_like(distance)
    for first in range(count - 1):
        pairs = pairs + torch.linalg.vector_norm(samples[first + 1 :] - samples[first], ord=norm, dim=-1).sum(0)
    return distance - _spread_factor(count, fairness) * pairs


def _check(samples: Tensor, target: Tensor) -> None:
    if samples.dim() == 0 or len(samples) == 0:
        raise ValueError(f"scores need at least one sample, got samples of shape {tuple(samples.shape)}")
    if samples.shape[1:] != target.shape:
        raise ValueError(
            f"samples {tuple(samples.shape)} must be (sample, ...) with the target's shape "
            f"{tuple(target.shape)} after the sample axis"
        )


def _spread_factor(count: int, fairness: float) -> float:
    if not 0 <= fairness <= 1:
        raise ValueError(f"fairness must lie between 0 (standard) and 1 (fair), got {fairness}")
    if count == 1:
        return 0.0
    return fairness / (count * (count - 1)) + (1 - fairness) / count**2


class _SortedCRPS(torch.autograd.Function):
    """The score is piecewise linear, so the forward pass can leave its whole gradient for the backward."""

    @staticmethod
    def forward(ctx: Any, samples: Tensor, target: Tensor, factor: float) -> Tensor:
        count, entries = len(samples), target.numel()
        x, y = samples.reshape(count, entries), target.reshape(entries)
        score = torch.empty_like(y)
        needs_gradient = any(ctx.needs_input_grad)
        slopes = x.new_empty(entries if needs_gradient else 0, count)
        for_target = torch.empty_like(y)
        # Block by block with the samples of an entry side by side, so that all of it stays in the cache.
        block = max(1, _BLOCK // count) if x.device.type == "cpu" else max(1, entries)
        for start in range(0, entries, block):
            here = slice(start, start + block)
            part = x[:, here].T.contiguous()
            error = part - y[here, None]
            if needs_gradient:
                ordered, order = _argsort(part)
                slope = error.sign().div_(count)
                for_target[here] = -slope.sum(1)
                torch.sub(slope, slope.scatter(1, order, _places(ordered)), alpha=factor, out=slopes[here])
            else:
                ordered = _sort(part)
            spread = ordered @ _place(count, like=ordered)
            score[here] = error.abs_().mean(1).sub_(spread, alpha=factor)
        if needs_gradient:
            ctx.save_for_backward(slopes.T.reshape(samples.shape), for_target.view(target.shape))
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


_BLOCK = 1 << 17  # numbers in a block: half a megabyte in single precision


def _place(count: int, *, like: Tensor) -> Tensor:
    """2k - K - 1 for k = 1 ... K: how many sorted samples lie below, less how many lie above."""
    return torch.arange(1 - count, count, 2, dtype=like.dtype, device=like.device)


def _places(ordered: Tensor) -> Tensor:
    """The same for rows of sorted samples (entry, sample), where equal samples share the mean of their places."""
    count = ordered.shape[1]
    places = _place(count, like=ordered).expand_as(ordered)
    rows = (ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero()[:, 0]
    if not len(rows):
        return places
    tied = ordered[rows]
    changes = tied[:, 1:] != tied[:, :-1]
    edge = torch.ones_like(changes[:, :1])
    index = torch.arange(count, device=ordered.device).expand_as(tied)
    first = torch.where(torch.cat([edge, changes], 1), index, 0).cummax(1).values
    last = torch.where(torch.cat([changes, edge], 1), index, count).flip(1).cummin(1).values.flip(1)
    return places.index_put((rows,), (first + last + 1 - count).to(ordered.dtype))


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
