"""A baseline: a deterministic potential with a width proportional to the RMS force of the structure."""

from collections.abc import Sequence

from ase import Atoms
from torch import Tensor

from pmlip.backbones.base import Graph
from pmlip.methods._gaussian import Gaussian, fitted
from pmlip.methods.base import BuiltFrom, Method
from pmlip.samples import mean_per_system

BUILT_FROM = BuiltFrom("deterministic")


class ForceScaled(Gaussian):
    name = "force-scaled"

    def force_units(self, graph: Graph, forces: Tensor) -> Tensor:
        """Root mean square force of each atom's structure, (atom, 1)."""
        node = graph.rows["node"]
        return mean_per_system(forces.square(), node, graph.systems).sqrt()[node, None]


make = ForceScaled


def build(tuned: Sequence[Method], *, train: Sequence[Atoms], valid: Sequence[Atoms]) -> Gaussian:
    return fitted(ForceScaled(tuned[0].backbone), train=train, valid=valid)
