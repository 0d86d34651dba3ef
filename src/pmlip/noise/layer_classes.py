"""Change the class of a layer in place; the object, its parameters and their names stay the same.

A method gives a layer a class that inherits from the method's mixin and from the layer's original class. Unlike a
wrapper, this keeps the layer's name and state-dict keys. Unlike a hook, it works with `deepcopy`, `pickle` and
`torch.compile`.
"""

from typing import Any, ClassVar, TypeVar

from torch import nn


class Mixin(nn.Module):
    """Base class of mixins for layers; `super()` inside a mixin is the layer's original class."""

    plain_class: ClassVar[type[nn.Module]]  # the layer's original class
    family: ClassVar[type["Mixin"]]  # the method's mixin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is created at run time, so pickle needs a recipe. Mixins can be nested, so store the whole chain.
        families: list[type[Mixin]] = []
        plain: Any = type(self)
        while "family" in vars(plain):
            families.append(plain.family)
            plain = plain.plain_class
        return _new, (families, plain), self.__getstate__()


M = TypeVar("M", bound=Mixin)

_CLASSES: dict[tuple[type[Mixin], type[nn.Module]], Any] = {}


def mixed_class(family: type[M], plain: type[nn.Module]) -> type[M]:
    """Return the class that inherits from both; the same arguments return the same class."""
    if (family, plain) not in _CLASSES:
        name = family.__name__.removesuffix("Layer") + plain.__name__
        body = {"family": family, "plain_class": plain, "__module__": __name__}
        _CLASSES[family, plain] = type(name, (family, plain), body)
    made: type[M] = _CLASSES[family, plain]
    return made


def become(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Change the class of a layer in place; its attributes stay."""
    object.__setattr__(layer, "__class__", kind)


def _new(families: list[type[Mixin]], plain: type[nn.Module]) -> nn.Module:
    """Create an uninitialised layer of a mixed class, for pickle."""
    for family in reversed(families):
        plain = mixed_class(family, plain)
    return plain.__new__(plain)
