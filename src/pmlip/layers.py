"""Layers that change what they are: another class, the same object, parameters and names.

A layer that takes part in a method is given a class mixed from the method's own and the layer's. Unlike a wrapper it
keeps its place and its state-dict keys; unlike a hook it survives `deepcopy`, `pickle` and `torch.compile`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mixin(nn.Module):
    """What a method mixes into the class of a layer; `super()` inside it is the layer's own class."""

    plain_class: ClassVar[type[nn.Module]]  # the layer's own
    family: ClassVar[type["Mixin"]]  # the method's

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, as may be the one it is mixed with: pickle must be told how to make it again.
        families: list[type[Mixin]] = []
        plain: Any = type(self)
        while "family" in vars(plain):
            families.append(plain.family)
            plain = plain.plain_class
        return _new, (families, plain), self.__getstate__()


M = TypeVar("M", bound=Mixin)

_CLASSES: dict[tuple[type[Mixin], type[nn.Module]], Any] = {}


def mixed_class(family: type[M], plain: type[nn.Module]) -> type[M]:
    """The class of layers that are both; always the same one."""
    if (family, plain) not in _CLASSES:
        name = family.__name__.removesuffix("Layer") + plain.__name__
        body = {"family": family, "plain_class": plain, "__module__": __name__}
        _CLASSES[family, plain] = type(name, (family, plain), body)
    made: type[M] = _CLASSES[family, plain]
    return made


def become(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Change the class of a layer and keep all it holds."""
    object.__setattr__(layer, "__class__", kind)


def _new(families: list[type[Mixin]], plain: type[nn.Module]) -> nn.Module:
    for family in reversed(families):
        plain = mixed_class(family, plain)
    return plain.__new__(plain)


@dataclass(frozen=True)
class Gathered:
    """Rows [a[i], b[j], c, ...] of several tables side by side, for a linear layer, without putting them together.

    Each table goes through its own columns of the weights and is gathered after that: a table of nodes or bonds has
    far fewer rows than there are edges or angles.
    """

    parts: tuple[tuple[Tensor, Callable[[Tensor], Tensor] | None], ...]  # a table, how it is gathered; None: as it is

    def together(self) -> Tensor:
        values = [table if gather is None else gather(table) for table, gather in self.parts]
        rows = torch.broadcast_shapes(*(value.shape[:-1] for value in values))
        return torch.cat([value.expand(*rows, -1) for value in values], -1)

    def square(self) -> "Gathered":
        return Gathered(tuple((table.square(), gather) for table, gather in self.parts))


def gathered(*parts: tuple[Tensor, Tensor | None]) -> Gathered:
    """Tables (row, feature), each with the numbers of its rows to take; None: all of them in order."""
    return Gathered(tuple((table, None if index is None else _Rows(index)) for table, index in parts))


@dataclass(frozen=True)
class _Rows:
    index: Tensor

    def __call__(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.index)


def linear(x: Tensor | Gathered, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b."""
    if isinstance(x, Tensor):
        return functional.linear(x, weight, bias)
    columns = weight.split([table.shape[-1] for table, _ in x.parts], dim=1)
    terms: list[Tensor] = []
    for (table, gather), own in zip(x.parts, columns, strict=True):
        term = functional.linear(table, own, None if terms else bias)
        terms.append(term if gather is None else gather(term))
    return sum(terms[1:], start=terms[0])


class GatheredLinear(nn.Linear):
    """A linear layer that also takes rows which are not put together."""

    def forward(self, x: Tensor | Gathered) -> Tensor:
        return linear(x, self.weight, self.bias)
