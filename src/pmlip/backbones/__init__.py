"""Potentials by name, each in its own file, imported when asked for."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import torch

from pmlip.backbones.base import Backbone, Graph, weights_hash

__all__ = ["Backbone", "Graph", "available", "load_backbone", "weights_hash"]


def available() -> list[str]:
    """The names of the backbones there are adapters for, whether or not their packages are installed."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name != "base" and module.name[0] != "_"]


def load_backbone(
    name: str, *, weights: str | Path | None = None, device: str = "cpu", trust: bool = False
) -> Backbone:
    """A pretrained potential by name: "chgnet", or with a variant after a colon, "chgnet:r2scan".

    weights: a local checkpoint of the potential's package instead of the one the package brings.
    trust: whether a file that can execute code when it is loaded may be read.
    """
    family, _, variant = name.partition(":")
    if family not in available():
        raise ValueError(f"unknown backbone {family!r}; allowed: {', '.join(available())}")
    adapter = importlib.import_module(f"pmlip.backbones.{family}")
    # most packages' files hold weights alone, and their adapters need no trust
    trusting = {"trust": trust} if "trust" in inspect.signature(adapter.load).parameters else {}
    with torch.random.fork_rng(devices=[]):  # packages draw weights before they load them
        backbone: Backbone = adapter.load(variant, weights=weights, device=device, **trusting)
    return backbone
