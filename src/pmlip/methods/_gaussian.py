"""A normal distribution around a deterministic potential: trained as that, its widths fitted on validation data."""

from collections.abc import Sequence

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from pmlip.backbones.base import Backbone, Graph
from pmlip.methods.base import Learner, WrappedMethod, each_sample
from pmlip.spread_fit import best_width
from pmlip.structures import LABELS
from pmlip.structures.labels import labels


class Gaussian(WrappedMethod):
    """Subclasses say what the width of the forces is proportional to; energies per atom and stresses have one width."""

    one_pass = True
    widths: Tensor  # of the outputs, in units of what they are proportional to; zero before they are fitted

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.register_buffer("widths", torch.zeros(len(LABELS), dtype=torch.float64))

    @property
    def trained(self) -> bool:
        return bool(self.widths.any())

    def _scale_spread(self, factor: float) -> None:
        self.widths *= factor

    def force_units(self, graph: Graph, forces: Tensor) -> Tensor:
        """What the width of each force component is a multiple of, (atom, 1)."""
        raise NotImplementedError

    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        outputs = self.backbone(graph)
        if draws is None or self.training or not self.trained:  # it is the potential inside that is trained
            count = 1 if draws is None else len(draws)
            return {name: value.expand(count, *value.shape) for name, value in outputs.items()}
        units = self._units(graph, outputs)
        widths = {name: width * units[name] for name, width in zip(LABELS, self.widths, strict=True) if name in units}

        def run(generator: torch.Generator) -> dict[str, Tensor]:
            moved = {}
            for name, value in outputs.items():
                noise = torch.randn(value.shape, generator=generator).to(widths[name])
                moved[name] = value + (widths[name] * noise).to(value)
            return moved

        return each_sample(run, draws)

    def _units(self, graph: Graph, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        atoms = torch.bincount(graph.rows["node"], minlength=graph.systems)
        units = {"energy": atoms.double(), "forces": self.force_units(graph, outputs["forces"]).double()}
        if "stress" in outputs:
            units["stress"] = torch.ones_like(outputs["stress"]).double()
        return units

    def fit_widths(self, valid: Sequence[Atoms]) -> None:
        """Fit the width of each output to the validation data: the one with the smallest CRPS."""
        target = labels(valid)
        collected: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in LABELS}
        outputs = self.predict(valid)
        for index, atoms in enumerate(valid):
            graph = self.backbone.graph([atoms])
            own = outputs.system == index
            single = {
                name: (value[own] if name == "forces" else value[[index]]).to(graph.rows["node"].device)
                for name, value in outputs.items()
            }
            for name, unit in self._units(graph, single).items():
                label = target[name][own] if name == "forces" else target[name][[index]]
                error = (single[name].cpu().double() - label).numpy()
                present = np.isfinite(error)
                collected[name].append((error[present], np.broadcast_to(unit.cpu().numpy(), error.shape)[present]))
        for position, name in enumerate(LABELS):
            pairs = [pair for pair in collected[name] if len(pair[0])]
            if pairs:
                errors, units = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
                self.widths[position] = best_width(errors, units)

    def learner(self) -> Learner:
        return GaussianLearner(self)


class GaussianLearner(Learner):
    """Trains the potential inside, then fits the widths."""

    needs_validation = True
    model: Gaussian

    def fit_on_validation(self, valid: Sequence[Atoms]) -> None:
        self.model.fit_widths(valid)


def fitted(model: Gaussian, valid: Sequence[Atoms]) -> Gaussian:
    """The model with its widths fitted to validation data."""
    model.fit_widths(valid)
    return model
