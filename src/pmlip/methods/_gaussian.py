"""A normal distribution around a deterministic potential, whose widths are fitted to validation data."""

from collections.abc import Sequence

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from pmlip.backbones.base import Backbone, Graph, evaluating
from pmlip.methods.base import Learner, WrappedMethod, each_sample
from pmlip.spread_fit import best_width
from pmlip.structures import LABELS
from pmlip.structures.labels import labels


class Gaussian(WrappedMethod):
    """Gaussian samples around one prediction. Energies per atom and stresses have one width for all structures.

    Subclasses define the unit of the force widths in `force_units`.
    """

    one_pass = True
    widths: Tensor  # (output,) standard deviations, as multiples of their units; zero before they are fitted

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.register_buffer("widths", torch.zeros(len(LABELS), dtype=torch.float64))

    @property
    def trained(self) -> bool:
        return bool(self.widths.any())

    def _scale_spread(self, factor: float) -> None:
        self.widths *= factor

    def force_units(self, graph: Graph, forces: Tensor) -> Tensor:
        """Unit of the width of each atom's force components, (atom, 1)."""
        raise NotImplementedError

    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        if draws is None or self.training or not self.trained:  # training fits the backbone alone
            count = 1 if draws is None else len(draws)
            return {name: value.expand(count, *value.shape) for name, value in self.backbone(graph).items()}
        outputs, units = self.outputs_and_units(graph)
        widths = {name: width * units[name] for name, width in zip(LABELS, self.widths, strict=True) if name in units}

        def run(generator: torch.Generator) -> dict[str, Tensor]:
            sample = {}
            for name, value in outputs.items():
                noise = torch.randn(value.shape, generator=generator).to(widths[name])
                sample[name] = value + (widths[name] * noise).to(value)
            return sample

        return each_sample(run, draws)

    def outputs_and_units(self, graph: Graph) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Outputs of the backbone, and the units of their widths, in double precision."""
        outputs = self.backbone(graph)
        atoms = torch.bincount(graph.rows["node"], minlength=graph.systems)
        units = {"energy": atoms.double(), "forces": self.force_units(graph, outputs["forces"]).double()}
        if "stress" in outputs:
            units["stress"] = torch.ones_like(outputs["stress"]).double()
        return outputs, units

    def fit_widths(self, valid: Sequence[Atoms], *, train: Sequence[Atoms]) -> None:
        """Set the width of each output to the value with the smallest CRPS on the validation data."""
        collected: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in LABELS}
        with evaluating(self), torch.no_grad():
            for atoms in valid:
                target = labels(atoms)
                outputs, units = self.outputs_and_units(self.backbone.graph([atoms]))
                for name, unit in units.items():
                    error = (outputs[name].cpu().double() - target[name]).numpy()
                    present = np.isfinite(error)
                    collected[name].append((error[present], np.broadcast_to(unit.cpu().numpy(), error.shape)[present]))
        for position, name in enumerate(LABELS):
            pairs = [pair for pair in collected[name] if len(pair[0])]
            if pairs:
                errors, own = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
                self.widths[position] = best_width(errors, own)

    def learner(self) -> Learner:
        return GaussianLearner(self)


class GaussianLearner(Learner):
    """Trains the backbone, then fits the widths."""

    needs_validation = True
    model: Gaussian

    def fit_on_validation(self, valid: Sequence[Atoms], *, train: Sequence[Atoms]) -> None:
        self.model.fit_widths(valid, train=train)


def fitted(model: Gaussian, *, train: Sequence[Atoms], valid: Sequence[Atoms]) -> Gaussian:
    """Fit the widths of `model` to validation data, in place, and return it."""
    model.fit_widths(valid, train=train)
    return model
