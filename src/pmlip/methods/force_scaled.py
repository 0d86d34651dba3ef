"""Large forces have large errors: a deterministic potential, and a width proportional to the structure's forces."""

from torch import Tensor

from pmlip.backbones.base import Graph
from pmlip.methods._gaussian import Gaussian
from pmlip.samples import mean_per_system


class ForceScaled(Gaussian):
    name = "force-scaled"

    def force_units(self, graph: Graph, forces: Tensor) -> Tensor:
        """The root mean square force of the structure."""
        node = graph.rows["node"]
        return mean_per_system(forces.square(), node, graph.systems).sqrt()[node, None]


make = ForceScaled
