"""pmlip gives machine-learning interatomic potentials an uncertainty.

It adds noise to the first linear layer of each message and update MLP and trains the model with the fair CRPS. Every
prediction then consists of K samples, and their spread is the uncertainty. The modules in the order of the data flow:

    structures -> backbones -> noise -> perturbed -> methods -> samples -> scores -> losses -> training
        -> calibration | metrics -> evaluation -> report | prediction, calculator, propagation | cli

Imports are lazy: `import pmlip` loads no other package, and each public name is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmlip import datasets, losses, metrics, nbody, noise, report, scores, torchsim
    from pmlip.backbones import load_backbone
    from pmlip.calculator import PMLIPCalculator, Recorder
    from pmlip.calibration import calibrate
    from pmlip.errors import CheckpointError
    from pmlip.evaluation import evaluate
    from pmlip.loading import load
    from pmlip.methods.blip import BLIP
    from pmlip.methods.ensemble import Ensemble
    from pmlip.methods.mc_dropout import MCDropout
    from pmlip.methods.p import Potential, perturb
    from pmlip.noise.injection import Site
    from pmlip.perturbed import Perturbed
    from pmlip.propagation import propagate
    from pmlip.samples import Outputs, Samples
    from pmlip.structures.files import read_structures
    from pmlip.structures.labels import labels
    from pmlip.training.config import FinetuneConfig
    from pmlip.training.finetuning import finetune

    __version__: str

# public name -> module it lives in; None: it is a module itself
_MODULES: dict[str, str | None] = {
    "BLIP": "pmlip.methods.blip",
    "CheckpointError": "pmlip.errors",
    "Ensemble": "pmlip.methods.ensemble",
    "FinetuneConfig": "pmlip.training.config",
    "MCDropout": "pmlip.methods.mc_dropout",
    "Outputs": "pmlip.samples",
    "PMLIPCalculator": "pmlip.calculator",
    "Perturbed": "pmlip.perturbed",
    "Potential": "pmlip.methods.p",
    "Recorder": "pmlip.calculator",
    "Samples": "pmlip.samples",
    "Site": "pmlip.noise.injection",
    "calibrate": "pmlip.calibration",
    "datasets": None,
    "evaluate": "pmlip.evaluation",
    "finetune": "pmlip.training.finetuning",
    "labels": "pmlip.structures.labels",
    "load": "pmlip.loading",
    "load_backbone": "pmlip.backbones",
    "losses": None,
    "metrics": None,
    "nbody": None,
    "noise": None,
    "perturb": "pmlip.methods.p",
    "propagate": "pmlip.propagation",
    "read_structures": "pmlip.structures.files",
    "report": None,
    "scores": None,
    "torchsim": None,
}

__all__ = [
    "BLIP",
    "CheckpointError",
    "Ensemble",
    "FinetuneConfig",
    "MCDropout",
    "Outputs",
    "PMLIPCalculator",
    "Perturbed",
    "Potential",
    "Recorder",
    "Samples",
    "Site",
    "calibrate",
    "datasets",
    "evaluate",
    "finetune",
    "labels",
    "load",
    "load_backbone",
    "losses",
    "metrics",
    "nbody",
    "noise",
    "perturb",
    "propagate",
    "read_structures",
    "report",
    "scores",
    "torchsim",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("pmlip")
    if name not in _MODULES:
        raise AttributeError(f"module 'pmlip' has no attribute {name!r}")
    module = _MODULES[name]
    found = (
        importlib.import_module(f"pmlip.{name}") if module is None else getattr(importlib.import_module(module), name)
    )
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
