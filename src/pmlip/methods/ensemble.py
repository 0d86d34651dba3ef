"""A deep ensemble: the same potential fine-tuned several times, from different seeds."""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from ase import Atoms
from torch import Tensor, nn

from pmlip import checkpoint
from pmlip.backbones.base import Backbone, Graph
from pmlip.methods.base import BuiltFrom, Learner, Method
from pmlip.methods.deterministic import Deterministic

BUILT_FROM = BuiltFrom("deterministic", several=True)


def checked_count(members: float) -> int:
    if members < 2 or members != int(members):
        raise ValueError(f"an ensemble has a whole number of members, at least 2, got members={members}")
    return int(members)


class Ensemble(Method):
    name = "ensemble"

    def __init__(self, backbone: Backbone, *, members: int = 3) -> None:
        self._hold(backbone, [Deterministic(backbone) for _ in range(checked_count(members))])

    def _hold(self, backbone: Backbone, members: Sequence[Method]) -> None:
        super().__init__()
        self.origin = checkpoint.Origin.of(backbone)
        self.members = nn.ModuleList(members)

    @classmethod
    def of(cls, members: Sequence[Method]) -> Self:
        """An ensemble of copies of fine-tuned models."""
        made = cls.__new__(cls)
        made._hold(members[0].backbone, copy.deepcopy(list(members)))
        made.origin = members[0].origin
        return made

    @property
    def fixed_samples(self) -> int | None:  # type: ignore[override]  # read-only
        return len(self.members)

    @property
    def backbone(self) -> Backbone:  # type: ignore[override]  # read-only; the first member owns it
        return self.parts()[0].backbone

    @property
    def trained(self) -> bool:
        """Whether the members differ; before training they are identical."""
        first, second = (member.parameters() for member in self.parts()[:2])
        return any(not torch.equal(one, other) for one, other in zip(first, second, strict=True))

    def settings(self) -> dict[str, int]:
        return {"members": len(self.members)}

    def parts(self) -> list[Method]:
        return list(self.members)  # type: ignore[arg-type]  # ModuleList is not generic

    def member(self, number: int, *, seed: int = 0) -> Backbone:
        last = len(self.members) - 1
        if not 0 <= number <= last:
            raise ValueError(f"the members of this ensemble are numbered 0 to {last}, got number={number}")
        return self.parts()[number].backbone

    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        if samples != len(self.members):
            count = len(self.members)
            raise ValueError(f"an ensemble of {count} members has exactly {count} samples, got samples={samples}")
        return torch.arange(samples)

    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        """Predictions of the members; draws=None: their mean."""
        chosen = range(len(self.members)) if draws is None else draws.tolist()
        outputs = [self.parts()[number](graph, None) for number in chosen]
        joined = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
        return {name: value.mean(0, keepdim=True) for name, value in joined.items()} if draws is None else joined

    def learner(self) -> Learner:
        return EnsembleLearner(self)


class EnsembleLearner(Learner):
    """Trains the members one after the other."""

    model: Ensemble

    def parts(self) -> Sequence[Method]:
        return self.model.parts()


make = Ensemble


def build(tuned: Sequence[Method], *, train: Sequence[Atoms], valid: Sequence[Atoms]) -> Ensemble:
    return Ensemble.of(tuned)
