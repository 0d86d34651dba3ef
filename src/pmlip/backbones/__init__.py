"""Potentials by name, each in its own file, imported when asked for."""

import importlib
import pkgutil
from pathlib import Path

from pmlip.backbones.base import Backbone, Graph, weights_hash

__all__ = ["Backbone", "Graph", "available", "load_backbone", "weights_hash"]


def available() -> list[str]:
    """The names of the backbones there are adapters for, whether or not their packages are installed."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"]


def load_backbone(name: str, *, weights: str | Path | None = None, device: str = "cpu") -> Backbone:
    """A pretrained potential by name: "chgnet", or with a variant after a colon, "chgnet:r2scan".

    weights: a local checkpoint of the potential's package instead of the one the package brings.
    """
    family, _, variant = name.partition(":")
    if family not in available():
        raise ValueError(f"unknown backbone {family!r}; allowed: {', '.join(available())}")
    adapter = importlib.import_module(f"pmlip.backbones.{family}")
    backbone: Backbone = adapter.load(variant, weights=weights, device=device)
    return backbone
