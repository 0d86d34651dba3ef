"""Reads and writes model files: weights, settings, and the backbone they belong to.

`read` and `Checkpoint.restore` check everything that a file holds, so that other code can trust it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmlip.backbones import Backbone, load_backbone, weights_hash
from pmlip.errors import CheckpointError, first_reason
from pmlip.novelty import KINDS, TrainingFeatures
from pmlip.plain_values import check_fields, check_type
from pmlip.provenance import Calibration, History
from pmlip.tensor_files import check_sum, read_tensors, write_tensors

# 2: energy_zero of potentials, 3: energy_curvature, 4: typed history and calibration, w_z, 5: tangent samples,
# 6: checksum
FORMAT_VERSION = 6
FIRST_WITH_CHECKSUM = 6
# what code raises that trusts a file, if the file does not hold what it should
DAMAGES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
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
    path: str | Path
    origin: Origin
    settings: Mapping[str, Any]
    state: Mapping[str, Tensor]
    versions: Mapping[str, str]  # versions of pmlip and torch that wrote the file
    history: History | None
    calibration: Calibration | None
    training_features: Mapping[str, TrainingFeatures]

    def restore(self, model: nn.Module) -> None:
        """Copy the stored weights to a model; raises CheckpointError unless all of them fit and are finite."""
        # take the precision from the parameters: buffers may have another one
        stored = [self.state[name] for name, _ in model.named_parameters() if name in self.state]
        model.to(next((value.dtype for value in stored if value.is_floating_point()), torch.get_default_dtype()))
        try:
            for name, value in model.state_dict().items():
                if name in self.state and self.state[name].is_floating_point() != value.is_floating_point():
                    raise ValueError(f"{name} is stored as {self.state[name].dtype}")
            model.load_state_dict(dict(self.state))
        except DAMAGES as error:
            reason = first_reason(error)
            raise CheckpointError(f"the weights in {self.path} do not fit this backbone: {reason}") from error
        for name, parameter in model.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise CheckpointError(
                    f"{self.path} cannot be used: its weight {name} is NaN or infinite; use another copy, or train "
                    "the model again"
                )


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
    write_tensors(path, content)


def read(path: str | Path) -> Checkpoint:
    """The content of a model file; raises CheckpointError if anything in it differs from what `write` writes."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    content = read_tensors(path)
    if isinstance(content, dict) and content.get("format") == RUN_FORMAT:
        raise CheckpointError(f"{path} is the state of a run, not a model; the finished model is model.pt beside it")
    if not isinstance(content, dict) or content.get("format") != "pmlip":
        raise CheckpointError(f"{path} was not written by pmlip")
    if missing := {"version", "origin", "settings", "state", "versions"} - content.keys():
        raise CheckpointError(f"{path} is incomplete: it lacks {', '.join(sorted(missing))}")
    try:
        check_type(content["version"], int, "version")
        check_type(content["versions"], Mapping[str, str], "versions")
        if content["version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {content['version']}, written by pmlip {content['versions'].get('pmlip')}; the "
                f"installed version reads formats up to {FORMAT_VERSION}: pip install -U pmlip"
            )
        check_sum(path, content, required=content["version"] >= FIRST_WITH_CHECKSUM)
        found = Checkpoint(
            path,
            Origin(**content["origin"]),
            content["settings"],
            content["state"],
            content["versions"],
            *_how_it_was_made(content),
            {kind: TrainingFeatures.from_record(one) for kind, one in content.get("training_features", {}).items()},
        )
        _check(found)
    except CheckpointError:
        raise
    except DAMAGES as error:
        raise CheckpointError(f"{path} is damaged: {first_reason(error)}") from error
    return found


def _check(found: Checkpoint) -> None:
    """Raise ValueError unless all entries have the types and sizes that `write` gives them."""
    check_fields(found, "content")
    check_type(found.settings, Mapping[str, Any], "settings")
    _check_settings(found.settings, found.state)
    for kind, training in found.training_features.items():
        if kind != training.kind or kind not in KINDS:
            raise ValueError(f"training features of kind {training.kind!r} are stored as {kind!r}")
        for curvature in training.curvatures.values():
            curvature.check()


def _check_settings(settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    if "method" in settings:
        check_type(settings["method"], str, "settings['method']")
        options = settings["options"]
        check_type(options, Mapping[str, Any], "settings['options']")
    else:
        options = settings
        check_type(settings.get("noise_dim"), int, "settings['noise_dim']")
        check_type(settings.get("sites"), Sequence[Mapping[str, Any]], "settings['sites']")
        for number, site in enumerate(settings["sites"]):
            for name, kind in {"name": str, "rows": str, "custom_envelope": bool}.items():
                check_type(site.get(name), kind, f"settings['sites'][{number}][{name!r}]")
    # sizes that would otherwise be built before they are compared with the weights
    dim, members = options.get("noise_dim"), options.get("members")
    for name, value in state.items():
        # "mixing" is the name before format 4
        if name.endswith(("noise.w_z", "noise.mixing")) and dim is not None and value.shape != (dim, dim):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, but noise_dim is {dim}")
    if members is not None and not any(name.startswith(f"members.{members - 1}.") for name in state):
        raise ValueError(f"it holds no weights of {members} members")


def _how_it_was_made(content: Mapping[str, Any]) -> tuple[History | None, Calibration | None]:
    """History and calibration. Before format 4, both are in one record, which the first files lack."""
    record = dict(content.get("record", {}))
    calibration = content.get("calibration") or record.pop("calibration", None)
    history = content.get("history") or record
    return (
        History.from_record(history) if history else None,
        Calibration.from_record(calibration) if calibration else None,
    )
