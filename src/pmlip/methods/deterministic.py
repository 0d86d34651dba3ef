"""A plain potential with one prediction and no spread, fine-tuned on the absolute error (the CRPS of one sample)."""

import torch
from torch import Tensor

from pmlip.backbones.base import Backbone, Graph
from pmlip.methods.base import WrappedMethod


class Deterministic(WrappedMethod):
    name = "deterministic"
    fixed_samples = 1

    @property
    def trained(self) -> bool:
        return False  # it has no spread

    def member(self, number: int, *, seed: int = 0) -> Backbone:
        if number != 0:
            raise ValueError(f"a deterministic potential has one sample, number 0, got number={number}")
        return self.backbone

    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        if samples != 1:
            raise ValueError(
                f"a deterministic potential has one sample, got samples={samples}; use an ensemble for more"
            )
        return torch.zeros(1)

    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        return {name: value[None] for name, value in self.backbone(graph).items()}


make = Deterministic
