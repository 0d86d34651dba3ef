"""P-EGNN, and the interface of methods that sample trajectories."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pmlip.methods.p import perturb
from pmlip.nbody.data import Trajectories
from pmlip.nbody.egnn import EGNN, EGNNConfig
from pmlip.noise.draws import draw, draw_for_training
from pmlip.noise.injection import noisy_layers
from pmlip.samples import Samples
from pmlip.scores import almost_fair_crps

DENSE = {"edge": None, "node": None}  # the leading axes of all rows are (sample, trajectory)
CHUNK = 2000  # graphs per forward pass


class Method(nn.Module, ABC):
    """The interface of a method to the benchmark, which uses nothing else."""

    trains_on_samples = False  # whether the loss needs K samples
    fixed_samples: int | None = None  # number of samples, if the method fixes it; it then has no noise-free sample

    @abstractmethod
    def loss(self, batch: Trajectories, generator: torch.Generator, samples: int) -> Tensor:
        """The training loss of a batch; `samples` is for methods that train on samples."""

    @abstractmethod
    def draw(self, samples: int, seed: int) -> Sequence[Any]:
        """One draw per sample; in `run`, the draw None gives the sample without noise."""

    @abstractmethod
    def run(self, data: Trajectories, draws: Sequence[Any]) -> Tensor:
        """Positions (sample, trajectory, particle, 3) for these draws."""

    def sample(self, data: Trajectories, *, samples: int, seed: int = 0) -> Samples:
        """K samples of the target positions, (sample, trajectory * particle, 3)."""
        draws = self.draw(samples, seed)
        size = max(1, CHUNK // len(draws))
        with torch.no_grad():
            parts = [self.run(data.part(i, i + size), draws) for i in range(0, len(data), size)]
        system = torch.arange(len(data)).repeat_interleave(data.positions.shape[1])
        return Samples({"positions": torch.cat(parts, 1).flatten(1, 2)}, system)


class PEGNN(Method):
    """EGNN with learned functional perturbations, trained on the fair CRPS of K samples.

    The defaults are the values of the paper, which does not test other values of the last four settings.
    """

    trains_on_samples = True

    def __init__(
        self,
        config: EGNNConfig | None = None,
        *,
        fairness: float = 1.0,  # below 1: almost-fair CRPS
        noise_dim: int = 32,
        particles: int | None = None,  # number of particles, each with its own noise; None: all share one noise vector
        every_layer: bool = False,  # noise in every layer of the message and update MLPs, not only in the first
        start: float = 0.0,  # initial standard deviation of the noise weights
    ) -> None:
        super().__init__()
        network = EGNN(config)
        self.network = perturb(network, sites=network.sites(every_layer=every_layer), noise_dim=noise_dim)
        self.fairness, self.particles = fairness, particles
        if start:
            for layer in noisy_layers(self.network):
                nn.init.normal_(layer.noise_weight, std=start)

    def loss(self, batch: Trajectories, generator: torch.Generator, samples: int) -> Tensor:
        noise = draw_for_training(samples, len(batch), self._numbers, generator=generator)
        return almost_fair_crps(self._positions(batch, noise), batch.target, fairness=self.fairness).mean()

    def draw(self, samples: int, seed: int) -> Sequence[Any]:
        return list(draw(samples, self._numbers, seed=seed))

    def run(self, data: Trajectories, draws: Sequence[Any]) -> Tensor:
        noise = torch.stack([torch.zeros(self._numbers) if e is None else e for e in draws])
        return self._positions(data, noise[:, None].expand(-1, len(data), -1))

    @property
    def _numbers(self) -> int:
        return self.network.noise.dim * (self.particles or 1)

    def _positions(self, data: Trajectories, noise: Tensor) -> Tensor:
        if self.particles:  # an edge uses the noise of its receiving particle
            noise = noise.unflatten(-1, (self.particles, -1))
        out: Tensor = self.network(
            data.positions[None], data.velocities[None], data.charges[None], noise=noise, rows=DENSE
        )
        return out
