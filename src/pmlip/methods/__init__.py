"""Ways to an uncertainty, by name, each in its own file: P (learned perturbations) and what to compare it with."""

import importlib
import inspect
import pkgutil
from typing import Any

from pmlip.backbones.base import Backbone
from pmlip.errors import did_you_mean
from pmlip.methods.base import Method

__all__ = ["Method", "available", "check", "make"]


def available() -> list[str]:
    """The names of all methods."""
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__) if _is_method(module.name)]


def _is_method(module: str) -> bool:
    return module != "base" and not module.startswith("_")


def check(name: str) -> None:
    """Refuse a name that is not a method's."""
    if name not in available():
        raise ValueError(f"unknown method {name!r}; allowed: {', '.join(available())}{did_you_mean(name, available())}")


def make(name: str, backbone: Backbone, **options: Any) -> Method:
    """A method around a copy of this backbone, ready to be fine-tuned; options are those of its class."""
    check(name)
    maker = importlib.import_module(f"pmlip.methods.{name.replace('-', '_')}").make
    allowed = [option for option in inspect.signature(maker).parameters if option != "backbone"]
    for option in options:
        if option not in allowed:
            hint = did_you_mean(option, allowed)
            raise ValueError(f"{name} has no option {option!r}; allowed: {', '.join(allowed) or 'none'}{hint}")
    method: Method = maker(backbone, **options)
    return method
