"""Load a saved model."""

from pathlib import Path
from typing import Any

import torch
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
    if (method := content.settings.get("method")) is not None:
        assert isinstance(backbone, Backbone)
        model: nn.Module = methods.make(method, backbone, **content.settings["options"])
    else:
        model = perturb_at(
            backbone, _stored_sites(path, content) if sites is None else sites, content.settings["noise_dim"]
        )
    # take the precision from the parameters: buffers may have another one
    stored = [content.state[name] for name, _ in model.named_parameters() if name in content.state]
    model.to(next((value.dtype for value in stored if value.is_floating_point()), torch.get_default_dtype()))
    try:
        model.load_state_dict(dict(content.state))
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {path} do not fit this backbone: {first_reason(error)}") from error
    if isinstance(model, Method):
        model.history, model.calibration = content.history, content.calibration
        model.training_features = content.training_features
    return model.to(device)


def _stored_sites(path: str | Path, content: checkpoint.Checkpoint) -> list[Site]:
    stored = content.settings["sites"]
    if any(site["custom_envelope"] for site in stored):
        raise CheckpointError(f"{path} has sites with custom envelopes, which are not stored; pass sites=...")
    return [Site(site["name"], site["rows"]) for site in stored]
