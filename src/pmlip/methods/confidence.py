"""Orb-v3's confidence head: a Gaussian whose width is proportional to the force error that Orb expects on each atom."""

from torch import Tensor

from pmlip.backbones.base import Backbone, Graph
from pmlip.methods._gaussian import Gaussian


class Confidence(Gaussian):
    name = "confidence"

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        if not getattr(backbone, "has_confidence", False):
            raise ValueError(f"{backbone.name}:{backbone.variant} has no confidence head; only Orb-v3 has one")

    def force_units(self, graph: Graph, forces: Tensor) -> Tensor:
        """Expected absolute error of each atom's force components, (atom, 1)."""
        errors: Tensor = self.backbone.expected_errors(graph)  # type: ignore[operator]  # only Orb has it
        return errors[:, None]


make = Confidence
