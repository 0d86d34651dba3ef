"""Least-squares quadratic fit to a function of standard normal draws, from its gradients alone.

The slope of the fit is the mean gradient, and its curvature is the mean Hessian (Stein's lemma). gradient(e) returns
the gradient at each draw, (draw, dim), in double precision.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pmlip.noise.draws import SEED_OF_FIT, draw

PAIRS_FOR_SLOPE = 16  # antithetic pairs of draws
CURVED_DIRECTIONS = 16  # rank of the fitted Hessian; 8 suffice for CHGNet

Gradient = Callable[[Tensor], Tensor]


def fit_slope(gradient: Gradient, dim: int) -> Tensor:
    """Mean gradient, (dim,)."""
    # in the mean over a pair e, -e, terms of the function that are even in e cancel
    pairs = draw(2 * PAIRS_FOR_SLOPE, dim, seed=SEED_OF_FIT, kind="antithetic").split(2)
    return torch.cat([gradient(pair) for pair in pairs]).mean(0)


def fit_curvature(gradient: Gradient, dim: int) -> Tensor:
    """Mean Hessian, (dim, dim), in a low-rank approximation by its largest directions."""
    count = min(CURVED_DIRECTIONS, dim)

    def hessian_times(directions: Tensor, seed: int) -> Tensor:
        """Mean Hessian times each direction, (direction, dim)."""
        products = []
        for direction, e in zip(directions, draw(count, dim, seed=seed), strict=True):
            # Along the direction: three-point Gauss-Hermite quadrature, whose middle point has no weight here. Across
            # it: a draw and its negative, so that odd terms cancel.
            across = e - (e @ direction) * direction
            both, step = torch.stack([across, -across]), math.sqrt(3) * direction
            products.append((gradient(both + step) - gradient(both - step)).mean(0) / (2 * math.sqrt(3)))
        return torch.stack(products).cpu()

    # randomised subspace iteration: the image of random directions contains the largest directions of the Hessian
    random = functional.normalize(draw(count, dim, seed=SEED_OF_FIT, kind="orthogonal"))
    large = torch.linalg.qr(hessian_times(random, SEED_OF_FIT - 1).T).Q.T
    inner = hessian_times(large, SEED_OF_FIT - 2) @ large.T
    return large.T @ ((inner + inner.T) / 2) @ large
