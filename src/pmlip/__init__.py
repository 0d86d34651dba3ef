"""pmlip makes any machine-learning interatomic potential tell how sure it is.

Noise enters at the first linear layer of each message and update MLP, the model is trained with the fair CRPS,
and every prediction comes as K samples. To read the code, follow the flow of the data:

    datasets, reading -> structures -> backbones -> noise -> injection -> model (chunks, parabola, response, checkpoint)
        -> samples -> scores -> losses -> training (config, preparation, references, objective, optimisation, runstate)
        | metrics -> evaluation | calculator, propagation
"""

import importlib
from types import ModuleType

from pmlip import datasets, losses, metrics, noise, scores
from pmlip.backbones import load_backbone
from pmlip.calculator import PMLIPCalculator, Recorder
from pmlip.calibration import calibrate
from pmlip.checkpoint import CheckpointError
from pmlip.config import FinetuneConfig
from pmlip.evaluation import evaluate
from pmlip.injection import Site
from pmlip.methods.blip import BLIP
from pmlip.methods.ensemble import Ensemble
from pmlip.methods.mc_dropout import MCDropout
from pmlip.model import Perturbed, Potential, load, perturb
from pmlip.propagation import propagate
from pmlip.reading import read_structures
from pmlip.samples import Outputs, Samples
from pmlip.structures import labels
from pmlip.training import finetune

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

_WHEN_ASKED = ("nbody", "report", "torchsim")  # they import what most programs do not need


def __getattr__(name: str) -> ModuleType:
    if name in _WHEN_ASKED:
        return importlib.import_module(f"pmlip.{name}")
    raise AttributeError(f"module 'pmlip' has no attribute {name!r}")
