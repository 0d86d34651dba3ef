"""P, learned functional perturbations: what this package is about. See `pmlip.model`."""

from pmlip.backbones.base import Backbone
from pmlip.model import Potential, perturb


def make(backbone: Backbone, *, noise_dim: int = 128) -> Potential:
    return perturb(backbone, noise_dim=noise_dim)
