"""One-pass error bars: a deterministic potential whose widths grow with the novelty of each atom and structure.

The novelty comes from gradients at the sites; `novelty_latent` takes it from latent features.
"""

from collections.abc import Sequence

import torch
from ase import Atoms
from ase.data import chemical_symbols
from torch import Tensor

from pmlip import novelty
from pmlip.backbones.base import Graph
from pmlip.methods._gaussian import Gaussian, fitted
from pmlip.methods.base import BuiltFrom, Method
from pmlip.novelty import TrainingFeatures
from pmlip.samples import Outputs

BUILT_FROM = BuiltFrom("deterministic")


class NoveltyWidths(Gaussian):
    """Forces have the width w novelty^b of their atom; energies and stresses have the width of their structure."""

    name = "novelty"
    kind = "gradients"

    @property
    def _training(self) -> TrainingFeatures:
        return self._training_features(self.kind)

    def outputs_and_units(self, graph: Graph) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        training, node = self._training, graph.rows["node"]
        gamma, outputs = novelty.lengths(self.backbone, graph, training)
        found = training.novelty(gamma, Outputs(outputs, node.cpu()))
        if bool(found.atom.isinf().any()):
            unknown = sorted(set(graph.numbers.tolist()) - set(training.curvatures))
            raise ValueError(
                f"the training set holds no {', '.join(chemical_symbols[number] for number in unknown)}, so the error "
                "bars of these structures are unknown; use `predict` for the prediction alone"
                if unknown
                else "an atom has no neighbours, so its error bar is unknown; use `predict` for the prediction alone"
            )
        atoms, systems = (x.to(node.device) ** training.exponent for x in (found.atom, found.structure))
        units = {"energy": torch.bincount(node, minlength=graph.systems) * systems, "forces": atoms[:, None]}
        if "stress" in outputs:
            units["stress"] = systems[:, None].expand_as(outputs["stress"])
        return outputs, units

    def fit_widths(self, valid: Sequence[Atoms], *, train: Sequence[Atoms]) -> None:
        """Fit the novelty to the training data unless it is fitted already, then the widths to validation data."""
        if self.kind not in self.training_features:
            self.fit_novelty(train, valid=valid, kinds=[self.kind])
        super().fit_widths(valid, train=train)


make = NoveltyWidths


def build(tuned: Sequence[Method], *, train: Sequence[Atoms], valid: Sequence[Atoms]) -> Gaussian:
    return fitted(NoveltyWidths(tuned[0].backbone), train=train, valid=valid)
