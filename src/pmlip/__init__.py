"""pmlip makes any machine-learning interatomic potential tell how sure it is.

Noise enters at the first linear layer of each message and update MLP, the model is trained with the fair CRPS,
and every prediction comes as K samples. To read the code, follow the flow of the data:

    datasets, reading -> structures -> backbones -> noise -> injection -> model (chunks, checkpoint) -> samples
        -> scores -> losses -> training (config, runstate, references) | metrics -> evaluation | calculator, propagation
"""

from pmlip import datasets, losses, metrics, noise, scores
from pmlip.backbones import load_backbone
from pmlip.calculator import PMLIPCalculator, Recorder
from pmlip.checkpoint import CheckpointError
from pmlip.config import FinetuneConfig
from pmlip.evaluation import evaluate
from pmlip.injection import Site
from pmlip.model import Perturbed, Potential, load, perturb
from pmlip.propagation import propagate
from pmlip.reading import read_structures
from pmlip.samples import Outputs, Samples
from pmlip.structures import labels
from pmlip.training import finetune

__all__ = [
    "CheckpointError",
    "FinetuneConfig",
    "Outputs",
    "PMLIPCalculator",
    "Perturbed",
    "Potential",
    "Recorder",
    "Samples",
    "Site",
    "datasets",
    "evaluate",
    "finetune",
    "labels",
    "load",
    "load_backbone",
    "losses",
    "metrics",
    "noise",
    "perturb",
    "propagate",
    "read_structures",
    "scores",
]
