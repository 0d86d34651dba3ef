"""Muon (Jordan et al. 2024): an optimiser for weight matrices whose steps are orthogonal matrices.

    M <- beta M + (1 - beta) G,   W <- W - lr (0.2 sqrt(max(m, n)) orthogonalised((1 - beta) G + beta M) + decay W)

The step has the same size in all directions of a matrix; the steps of AdamW have low rank. The factor
0.2 sqrt(max(m, n)) gives the entries of a step the same size as in AdamW, so both can use one learning rate.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

BETA = 0.95
# quintic iteration of Jordan et al. that moves singular values between 0 and 1 close to 1
ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Muon for parameters that are matrices.

    Unlike torch.optim.Muon, it needs no bfloat16, which not every CPU supports, and it updates matrices of the same
    shape together.
    """

    def __init__(self, params: Iterable[Any], *, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"Muon optimises matrices only, got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = {}  # matrices of the same shape are stacked
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in alike.items():
                steps = orthogonalised(torch.stack([self._direction(parameter) for parameter in parameters]))
                size = 0.2 * math.sqrt(max(shape))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(steps), alpha=-group["lr"] * size)

    def _direction(self, parameter: Tensor) -> Tensor:
        """The gradient with Nesterov momentum."""
        assert parameter.grad is not None
        mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
        mean.lerp_(parameter.grad, 1 - BETA)
        return parameter.grad.lerp(mean, BETA)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Approximately U V^T for each matrix U S V^T of (matrix, m, n): singular values end between 0.7 and 1.2."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalised(matrices.mT).mT
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
