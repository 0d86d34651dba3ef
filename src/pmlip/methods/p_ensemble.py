"""An ensemble of P models.

Near the training data, each member estimates the error; out of distribution, the members also disagree.
"""

from collections.abc import Sequence

import torch
from ase import Atoms
from torch import Tensor

from pmlip.backbones.base import Backbone, Graph
from pmlip.methods.base import BuiltFrom, Learner, Method
from pmlip.methods.ensemble import Ensemble, EnsembleLearner, checked_count
from pmlip.methods.p import Potential, perturb
from pmlip.noise import draws as noise_draws
from pmlip.structures.atoms import Progress

BUILT_FROM = BuiltFrom("p", several=True)


class PEnsemble(Ensemble):
    """Sample k is sample k of member k mod M, for M members. A draw is the number of the member and the noise e."""

    name = "p-ensemble"
    fixed_samples = None

    def __init__(self, backbone: Backbone, *, members: int = 3, noise_dim: int = 128) -> None:
        self._hold(backbone, [perturb(backbone, noise_dim=noise_dim) for _ in range(checked_count(members))])

    @property
    def noise_dim(self) -> int:
        first = self.parts()[0]
        assert isinstance(first, Potential)
        return first.noise.dim

    def settings(self) -> dict[str, int]:
        return super().settings() | {"noise_dim": self.noise_dim}

    @property
    def in_turn(self) -> bool:  # type: ignore[override]  # read-only
        return not self.members_are_whole

    @property
    def members_are_whole(self) -> bool:
        return all(part.members_are_whole for part in self.parts())

    def member(self, number: int, *, seed: int = 0) -> Backbone:
        return self.parts()[number % len(self.members)].member(number, seed=seed)

    def _scale_spread(self, factor: float) -> None:
        """Scale the spread of every member; the differences between members stay the same."""
        for part in self.parts():
            part.scale_spread(factor)

    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        drawn = self.parts()[0].draw(samples, seed=seed)
        return torch.cat([(torch.arange(samples) % len(self.members))[:, None].to(drawn), drawn], 1)

    def draw_number(self, number: int, *, seed: int = 0) -> Tensor:
        drawn = self.parts()[0].draw_number(number, seed=seed)
        return torch.cat([torch.full((1, 1), number % len(self.members)).to(drawn), drawn], 1)

    def counterweights(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Counterweights of each member, weighted by its fraction of the draws."""
        own = [draws[draws[:, 0] == number] for number in range(len(self.members))]
        found = [(noise_draws.counterweights(rows[:, 1:]), rows) for rows in own if len(rows)]
        more = [torch.cat([rows[:1, :1].expand(2, 1), extra], 1) for (extra, _), rows in found]
        weights = [len(rows) / len(draws) * weight for (_, weight), rows in found]
        return torch.cat(more), torch.cat(weights)

    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        """Samples of the members; draws=None: the mean of their predictions without noise."""
        if draws is None:
            return super().forward(graph, None)
        chosen = [(draws[:, 0] == number).nonzero()[:, 0] for number in range(len(self.members))]
        outputs = [part(graph, draws[rows, 1:]) for part, rows in zip(self.parts(), chosen, strict=True) if len(rows)]
        in_order = torch.cat(chosen).argsort()
        return {name: torch.cat([output[name] for output in outputs])[in_order] for name in outputs[0]}

    def learner(self) -> Learner:
        return PEnsembleLearner(self)


class PEnsembleLearner(EnsembleLearner):
    trains_on_samples = True
    calibrated_after = True

    def fit_tangents(
        self, train: Sequence[Atoms], *, cover: str | None = None, progress: Progress | None = None
    ) -> bool:
        return all(part.learner().fit_tangents(train, cover=cover, progress=progress) for part in self.parts())

    def forget_tangents(self) -> None:
        for part in self.parts():
            part.learner().forget_tangents()


make = PEnsemble


def build(tuned: Sequence[Method], *, train: Sequence[Atoms], valid: Sequence[Atoms]) -> PEnsemble:
    return PEnsemble.of(tuned)
