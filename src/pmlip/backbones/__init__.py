"""Load pretrained potentials by name; each has one adapter file, imported on first use."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import torch

from pmlip.backbones.base import Backbone, Graph, weights_hash

__all__ = ["Backbone", "Graph", "available", "load_backbone", "weights_hash"]


def available() -> list[str]:
    """Return the names of all backbones with an adapter, whether or not their packages are installed."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name != "base" and module.name[0] != "_"]


def load_backbone(
    name: str, *, weights: str | Path | None = None, device: str = "cpu", trust: bool = False
) -> Backbone:
    """Load a pretrained potential by name: "chgnet", or with a variant after a colon, "chgnet:r2scan".

    weights: local checkpoint in the package's own format; by default the package's published weights.
    trust: allow files that can execute code when they are loaded (pickles).
    """
    family, _, variant = name.partition(":")
    if family not in available():
        raise ValueError(f"unknown backbone {family!r}; allowed: {', '.join(available())}")
    adapter = importlib.import_module(f"pmlip.backbones.{family}")
    # only adapters whose files are pickles take `trust`
    trusting = {"trust": trust} if "trust" in inspect.signature(adapter.load).parameters else {}
    with torch.random.fork_rng(devices=[]):  # packages initialise weights at random before they load them
        backbone: Backbone = adapter.load(variant, weights=weights, device=device, **trusting)
    return backbone
