"""The best parabola through a function of normal draws, from its gradients alone.

Its slope is the mean of the gradient and its curvature the mean of the second derivatives (Stein's lemma). gradient(e)
gives the gradient at each draw, (draw, dim), in double precision.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pmlip.noise.draws import SEED_OF_FIT, draw

PAIRS_FOR_SLOPE = 16  # of draws
CURVED_DIRECTIONS = 16  # eight would do for CHGNet

Gradient = Callable[[Tensor], Tensor]


def fit_slope(gradient: Gradient, dim: int) -> Tensor:
    """The mean of the gradient, (dim,)."""
    # in pairs e and -e what is even cancels
    pairs = draw(2 * PAIRS_FOR_SLOPE, dim, seed=SEED_OF_FIT, kind="antithetic").split(2)
    return torch.cat([gradient(pair) for pair in pairs]).mean(0)


def fit_curvature(gradient: Gradient, dim: int) -> Tensor:
    """The mean of the second derivatives, (dim, dim), in the few directions in which they are large."""
    count = min(CURVED_DIRECTIONS, dim)

    def applied(directions: Tensor, seed: int) -> Tensor:
        """The mean of the second derivatives times each direction, (direction, dim)."""
        products = []
        for direction, e in zip(directions, draw(count, dim, seed=seed), strict=True):
            # along the direction the three-point rule for normal variables, whose middle point drops out; across it a
            # draw of both signs, so that what is odd cancels
            across = e - (e @ direction) * direction
            both, step = torch.stack([across, -across]), math.sqrt(3) * direction
            products.append((gradient(both + step) - gradient(both - step)).mean(0) / (2 * math.sqrt(3)))
        return torch.stack(products).cpu()

    anywhere = functional.normalize(draw(count, dim, seed=SEED_OF_FIT, kind="orthogonal"))
    large = torch.linalg.qr(applied(anywhere, SEED_OF_FIT - 1).T).Q.T
    inner = applied(large, SEED_OF_FIT - 2) @ large.T
    return large.T @ ((inner + inner.T) / 2) @ large
