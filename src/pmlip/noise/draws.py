"""Random draws e ~ N(0, I) of a perturbed model, which adds the noise z = W_z e; one z per (system, sample)."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pmlip.limits import LAST_SEED, check_sample_number, check_seed

SEED_OF_FIT = LAST_SEED  # reserved for fits to samples after training, so that predictions use other samples


def draw(samples: int, dim: int, *, seed: int = 0, kind: str = "plain", stream: int = 0, first: int = 0) -> Tensor:
    """Return standard normal draws e, shape (sample, dim), in double precision on the CPU.

    The draw of sample k depends only on (seed, k, dim, kind, stream): a larger `samples` appends rows and keeps the
    earlier ones. first: the number of the first sample; those before it are not computed. Draws of different streams
    are independent.

    kind:
        "plain"       independent rows. Use it for losses and scores: all estimators in `scores` and
                      `metrics` assume independent samples.
        "orthogonal"  blocks of `dim` mutually orthogonal rows with chi-distributed lengths. Each row is
                      still N(0, I). Lowers the variance of an estimated *spread*, not of the mean.
        "antithetic"  pairs (e, -e). Lowers the variance of the *mean* (the odd part of the response
                      cancels), but biases the variance (about +29 % at K = 4) and the CRPS. Never train
                      with it: at zero noise weights the gradients of a pair cancel, so the weights stay zero.
    """
    if samples < 1:
        raise ValueError(f"at least 1 sample must be drawn, got samples={samples}")
    if dim < 1:
        raise ValueError(f"noise_dim must be at least 1, got {dim}")
    check_seed(seed)
    check_sample_number(first, name="first")
    check_sample_number(first + samples - 1, name="first + samples - 1")
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of draw {kind!r}; allowed: {', '.join(_KINDS)}")
    return torch.from_numpy(_KINDS[kind](first, first + samples, dim, (seed, stream) if stream else (seed,)))


def draw_for_training(samples: int, systems: int, dim: int, *, generator: torch.Generator) -> Tensor:
    """Return an independent e for every (sample, system), shape (sample, system, dim), from a CPU generator."""
    return torch.randn(samples, systems, dim, generator=generator)


def counterweights(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return two control-variate draws c and -c, where c is the mean of `draws`, and their weights -1/2 and 1/2.

        mean_k f(e_k) - (f(c) - f(-c)) / 2

    is an unbiased estimate of the mean of f(e), because c and -c are equally likely. The part of f that is linear in e
    cancels.
    """
    centre = draws.mean(0)
    return torch.stack([centre, -centre]), torch.tensor([-0.5, 0.5])


def _plain(start: int, stop: int, dim: int, key: tuple[int, ...]) -> np.ndarray:
    return np.stack([np.random.default_rng((*key, k)).standard_normal(dim) for k in range(start, stop)])


def _orthogonal(start: int, stop: int, dim: int, key: tuple[int, ...]) -> np.ndarray:
    blocks = []
    for block in range(start // dim, -(-stop // dim)):
        random = np.random.default_rng((*key, block, 1))
        q, r = np.linalg.qr(random.standard_normal((dim, dim)))
        q *= np.sign(np.diag(r))  # without this the rotation is not uniformly distributed
        blocks.append(np.sqrt(random.chisquare(dim, (dim, 1))) * q.T)
    skipped = start % dim
    return np.concatenate(blocks)[skipped : skipped + stop - start]


def _antithetic(start: int, stop: int, dim: int, key: tuple[int, ...]) -> np.ndarray:
    half = _plain(start // 2, -(-stop // 2), dim, key)
    skipped = start % 2
    return np.stack([half, -half], axis=1).reshape(-1, dim)[skipped : skipped + stop - start]


_KINDS: dict[str, Callable[[int, int, int, tuple[int, ...]], np.ndarray]] = {
    "plain": _plain,
    "orthogonal": _orthogonal,
    "antithetic": _antithetic,
}
