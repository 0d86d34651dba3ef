"""Load a saved model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pmlip import checkpoint, methods
from pmlip.backbones.base import Backbone
from pmlip.errors import CheckpointError, first_reason
from pmlip.methods.base import Method
from pmlip.methods.p import perturb_at
from pmlip.noise.injection import Site, Sites
from pmlip.run_folder import model_file


def load(
    path: str | Path,
    *,
    backbone: nn.Module | None = None,
    sites: Sites | None = None,
    weights: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> Any:
    """Load the model that `save` wrote to `path`, or the model in the folder of a run of `pmlip finetune`.

    A pretrained potential is loaded again by its name; if it came from a local file, pass that file as `weights`. Any
    other module must be passed as `backbone`. If its sites had custom envelopes, pass `sites` too. trust: see
    `load_backbone`.
    """
    if not isinstance(path, str | Path):
        raise TypeError(
            f"path must be the file of a saved model, got a {type(path).__name__}; use pmlip.perturb for a potential"
        )
    path = model_file(path)
    content = checkpoint.read(path)
    if backbone is None:
        backbone = content.origin.load(weights=weights, trust=trust)
    content.origin.check(backbone)
    stored_sites = _stored_sites(content) if sites is None else sites
    try:
        model = _make(content.settings, backbone, stored_sites)
    except checkpoint.DAMAGES as error:
        raise CheckpointError(f"the settings in {path} do not fit this backbone: {first_reason(error)}") from error
    content.restore(model)
    if isinstance(model, Method):
        model.history, model.calibration = content.history, content.calibration
        model.training_features = content.training_features
    return model.to(device)


def _make(settings: Mapping[str, Any], backbone: nn.Module, sites: Sites) -> nn.Module:
    if (method := settings.get("method")) is None:
        return perturb_at(backbone, sites, settings["noise_dim"])
    if not isinstance(backbone, Backbone):
        raise ValueError(f"{method} needs a potential, got a {type(backbone).__name__}")
    return methods.make(method, backbone, **settings["options"])


def _stored_sites(content: checkpoint.Checkpoint) -> list[Site]:
    stored = content.settings.get("sites", [])
    if any(site["custom_envelope"] for site in stored):
        raise CheckpointError(f"{content.path} has sites with custom envelopes, which are not stored; pass sites=...")
    return [Site(site["name"], site["rows"]) for site in stored]
