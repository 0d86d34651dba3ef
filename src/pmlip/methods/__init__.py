"""Uncertainty methods by name, one file each: P (learned perturbations) and the methods it is compared with."""

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ase import Atoms

from pmlip.backbones.base import Backbone
from pmlip.errors import did_you_mean
from pmlip.methods.base import BuiltFrom, Method

__all__ = ["Method", "available", "build", "built_from", "check", "make"]


def available() -> list[str]:
    """Names of all methods."""
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__) if _is_method(module.name)]


def _is_method(module: str) -> bool:
    return module != "base" and not module.startswith("_")


def check(name: str) -> None:
    """Raise ValueError unless `name` is a method."""
    if name not in available():
        raise ValueError(f"unknown method {name!r}; allowed: {', '.join(available())}{did_you_mean(name, available())}")


def make(name: str, backbone: Backbone, **options: Any) -> Method:
    """A method around a copy of the backbone, ready to fine-tune; `options` are passed to the method's class."""
    check(name)
    maker = _module(name).make
    allowed = [option for option in inspect.signature(maker).parameters if option != "backbone"]
    for option in options:
        if option not in allowed:
            hint = did_you_mean(option, allowed)
            raise ValueError(f"{name} has no option {option!r}; allowed: {', '.join(allowed) or 'none'}{hint}")
    method: Method = maker(backbone, **options)
    return method


def built_from(name: str) -> BuiltFrom | None:
    """The fine-tuned models that a method is built from; None if the method itself is trained."""
    check(name)
    return getattr(_module(name), "BUILT_FROM", None)


def build(name: str, tuned: Sequence[Method], *, train: Sequence[Atoms], valid: Sequence[Atoms]) -> Method:
    """A method built from the fine-tuned models that `built_from(name)` names; some methods fit widths to `valid`."""
    built: Method = _module(name).build(tuned, train=train, valid=valid)
    return built


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"pmlip.methods.{name.replace('-', '_')}")
