"""Reads and writes model files: weights, settings, and the backbone they belong to.

Reading a file executes no code from it (`weights_only=True`). Writing is atomic.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmlip.atomic_files import atomic_write
from pmlip.backbones import Backbone, load_backbone, weights_hash
from pmlip.errors import CheckpointError
from pmlip.novelty import TrainingFeatures
from pmlip.provenance import Calibration, History

# 2: energy_zero of potentials, 3: energy_curvature, 4: typed history and calibration, w_z, 5: tangent samples
FORMAT_VERSION = 5
RUN_FORMAT = "pmlip-run"  # format of the saved state of a training run


@dataclass(frozen=True)
class Origin:
    """The backbone that a model was made from."""

    name: str  # name for `load_backbone`, or the class of a module without an adapter
    adapter: bool  # whether `load_backbone` can load it
    weights: str  # hash of its weights before any training

    @classmethod
    def of(cls, backbone: nn.Module) -> "Origin":
        if isinstance(backbone, Backbone):
            return cls(f"{backbone.name}:{backbone.variant}", True, weights_hash(backbone))
        kind = type(backbone)
        return cls(f"{kind.__module__}.{kind.__qualname__}", False, weights_hash(backbone))

    def load(self, *, weights: str | Path | None, trust: bool = False) -> nn.Module:
        if not self.adapter:
            raise CheckpointError(f"the model was made from a {self.name}; pass one as backbone=...")
        return load_backbone(self.name, weights=weights, trust=trust)

    def check(self, backbone: nn.Module) -> None:
        """Raise CheckpointError if the model was made from another backbone."""
        other = Origin.of(backbone)
        if other.name != self.name:
            raise CheckpointError(f"the model was made from {self.name}, not from {other.name}")
        # Without an adapter, the file restores all weights, so the weights of the given module do not matter.
        if self.adapter and other.weights != self.weights:
            raise CheckpointError(
                f"the model was made from {self.name} with weights {self.weights[:12]}, but this backbone has "
                f"{other.weights[:12]}; pass the file of the original weights as weights=PATH"
            )


@dataclass(frozen=True)
class Checkpoint:
    origin: Origin
    settings: Mapping[str, Any]
    state: Mapping[str, Tensor]
    versions: Mapping[str, str]  # versions of pmlip and torch that wrote the file
    history: History | None
    calibration: Calibration | None
    training_features: Mapping[str, TrainingFeatures]


def write(
    path: str | Path,
    *,
    origin: Origin,
    settings: Mapping[str, Any],
    state: Mapping[str, Tensor],
    history: History | None = None,
    calibration: Calibration | None = None,
    training_features: Mapping[str, TrainingFeatures] | None = None,
) -> None:
    content = {
        "format": "pmlip",
        "version": FORMAT_VERSION,
        "origin": asdict(origin),
        "settings": dict(settings),
        "state": dict(state),
        "history": asdict(history) if history else None,
        "calibration": asdict(calibration) if calibration else None,
        "training_features": {kind: one.to_record() for kind, one in (training_features or {}).items()},
        "versions": {"pmlip": version("pmlip"), "torch": str(torch.__version__)},
    }
    with atomic_write(path) as file:
        torch.save(content, file)


def read(path: str | Path) -> Checkpoint:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different type for every way a file can be broken
        raise CheckpointError(f"{path} is damaged or was not written by pmlip") from error
    if isinstance(content, dict) and content.get("format") == RUN_FORMAT:
        raise CheckpointError(f"{path} is the state of a run, not a model; the finished model is model.pt beside it")
    if not isinstance(content, dict) or content.get("format") != "pmlip":
        raise CheckpointError(f"{path} was not written by pmlip")
    if missing := {"version", "origin", "settings", "state", "versions"} - content.keys():
        raise CheckpointError(f"{path} is incomplete: it lacks {', '.join(sorted(missing))}")
    if content["version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {content['version']}, written by pmlip {content['versions']['pmlip']}; the installed "
            f"version reads formats up to {FORMAT_VERSION}: pip install -U pmlip"
        )
    return Checkpoint(
        Origin(**content["origin"]),
        content["settings"],
        content["state"],
        content["versions"],
        *_how_it_was_made(content),
        {kind: TrainingFeatures.from_record(one) for kind, one in content.get("training_features", {}).items()},
    )


def _how_it_was_made(content: Mapping[str, Any]) -> tuple[History | None, Calibration | None]:
    """History and calibration. Before format 4, both are in one record, which the first files lack."""
    record = dict(content.get("record", {}))
    calibration = content.get("calibration") or record.pop("calibration", None)
    history = content.get("history") or record
    return (
        History.from_record(history) if history else None,
        Calibration.from_record(calibration) if calibration else None,
    )
