"""What the processes of a run share."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:  # it takes seconds to import
    from lightning_fabric import Fabric


def sum_gradients(parameters: Sequence[nn.Parameter], fabric: "Fabric") -> None:
    """Add up the gradients of all processes."""
    if fabric.world_size == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = _sum(torch.cat([gradient.flatten() for gradient in gradients]), fabric)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def summed(terms: dict[str, float], fabric: "Fabric") -> dict[str, float]:
    """The terms of all processes, added up."""
    if fabric.world_size == 1:
        return terms
    values = _sum(torch.tensor(list(terms.values()), dtype=torch.float64, device=fabric.device), fabric)
    return dict(zip(terms, values.tolist(), strict=True))


def whole_batch(own: Tensor, count: int, fabric: "Fabric") -> Tensor:
    """The values of all `count` structures of a batch, (..., structure), of which a process has every world_size-th.

    Gradients flow to its own alone. All processes must ask, also one that has none.
    """
    if fabric.world_size == 1:
        return own
    longest = math.ceil(count / fabric.world_size)
    padded = functional.pad(own.detach(), (0, longest - own.shape[-1]))
    gathered = fabric.all_gather(padded)  # (process, ..., structure)
    assert isinstance(gathered, Tensor)
    whole = gathered.movedim(0, -1).flatten(-2)[..., :count].clone()
    whole[..., fabric.global_rank :: fabric.world_size] = own
    return whole


T = TypeVar("T")


def of_first(value: T, fabric: "Fabric") -> T:
    """What the first process has, in all of them."""
    if fabric.world_size == 1:
        return value
    given: T = fabric.broadcast(value)
    return given


def _sum(values: Tensor, fabric: "Fabric") -> Tensor:
    total = fabric.all_reduce(values, reduce_op="sum")
    assert isinstance(total, Tensor)
    return total
