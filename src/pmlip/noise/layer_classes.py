"""Layers that change what they are: another class, the same object, parameters and names.

A layer that takes part in a method is given a class mixed from the method's own and the layer's. Unlike a wrapper it
keeps its place and its state-dict keys; unlike a hook it survives `deepcopy`, `pickle` and `torch.compile`.
"""

from typing import Any, ClassVar, TypeVar

from torch import nn


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
