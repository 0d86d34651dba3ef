"""The simplest baseline: a deterministic potential with one constant width. A learned spread must beat it."""

from collections.abc import Sequence

import torch
from ase import Atoms
from torch import Tensor

from pmlip.backbones.base import Graph
from pmlip.methods._gaussian import Gaussian, fitted
from pmlip.methods.base import BuiltFrom, Method

BUILT_FROM = BuiltFrom("deterministic")


class Constant(Gaussian):
    name = "constant"

    def force_units(self, graph: Graph, forces: Tensor) -> Tensor:
        return torch.ones_like(forces[:, :1])


make = Constant


def build(tuned: Sequence[Method], *, train: Sequence[Atoms], valid: Sequence[Atoms]) -> Gaussian:
    return fitted(Constant(tuned[0].backbone), train=train, valid=valid)
