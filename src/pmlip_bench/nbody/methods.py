"""The methods of the N-body benchmark. Each is a module with a training loss, and samples positions of particles."""

import contextlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pmlip.methods.blip import Posterior, make_variational
from pmlip.methods.mc_dropout import add_dropout
from pmlip.nbody.data import Trajectories
from pmlip.nbody.egnn import EGNN, EGNNConfig, others
from pmlip.nbody.p_egnn import PEGNN, Method


class Deterministic(Method):
    """EGNN trained on the mean squared error; one sample."""

    fixed_samples = 1

    def __init__(self, config: EGNNConfig | None = None) -> None:
        super().__init__()
        self.network = EGNN(config)

    def loss(self, batch: Trajectories, generator: torch.Generator, samples: int) -> Tensor:
        out = self.network(batch.positions, batch.velocities, batch.charges)
        return (out - batch.target).square().mean()

    def draw(self, samples: int, seed: int) -> Sequence[Any]:
        if samples != 1:
            raise ValueError(f"a deterministic EGNN has one sample, got samples={samples}; use an ensemble for more")
        return [None]

    def run(self, data: Trajectories, draws: Sequence[Any]) -> Tensor:
        return self.network(data.positions, data.velocities, data.charges)[None]


class BLIP(Method):
    """EGNN with variational weights in all message-passing layers, trained on MSE + beta KL with one sample."""

    def __init__(self, config: EGNNConfig | None = None, *, beta: float = 0.01) -> None:
        super().__init__()
        self.network, self.beta = EGNN(config), _checked(beta)
        self.posterior = _uncertain_weights(self.network)

    def loss(self, batch: Trajectories, generator: torch.Generator, samples: int) -> Tensor:
        alpha = _alpha(self.posterior, self.network, batch)
        error = self._positions(batch, alpha, generator) - batch.target
        return error.square().mean() + self.beta * self.posterior.divergence(alpha)

    def draw(self, samples: int, seed: int) -> Sequence[Any]:
        return _generators(samples, seed)

    def run(self, data: Trajectories, draws: Sequence[Any]) -> Tensor:
        alpha = _alpha(self.posterior, self.network, data)
        return torch.stack([self._positions(data, None if draw is None else alpha, draw) for draw in draws])

    def _positions(
        self, data: Trajectories, alpha: dict[str, Tensor] | None, generator: torch.Generator | None
    ) -> Tensor:
        with self.posterior.drawing(alpha, generator):
            return self.network(data.positions, data.velocities, data.charges)


class PBLIP(PEGNN):
    """BLIP's variational weights combined with P-EGNN's noise, trained on fair CRPS + beta KL.

    The paper names this combination as future work.
    """

    def __init__(self, config: EGNNConfig | None = None, *, noise_dim: int = 32, beta: float = 0.01) -> None:
        super().__init__(config, noise_dim=noise_dim)
        self.beta = _checked(beta)
        self.posterior = _uncertain_weights(self.egnn)

    @property
    def egnn(self) -> EGNN:
        backbone = self.network.backbone
        assert isinstance(backbone, EGNN)
        return backbone

    def loss(self, batch: Trajectories, generator: torch.Generator, samples: int) -> Tensor:
        alpha = _alpha(self.posterior, self.egnn, batch)
        with self.posterior.drawing(alpha, generator):
            score = super().loss(batch, generator, samples)
        return score + self.beta * self.posterior.divergence(alpha)

    def draw(self, samples: int, seed: int) -> Sequence[Any]:
        return list(zip(super().draw(samples, seed), _generators(samples, seed), strict=True))

    def run(self, data: Trajectories, draws: Sequence[Any]) -> Tensor:
        alpha = _alpha(self.posterior, self.egnn, data)
        outputs = []
        for pair in draws:
            e, generator = (None, None) if pair is None else pair
            with self.posterior.drawing(None if pair is None else alpha, generator):
                outputs.append(super().run(data, [e]))
        return torch.cat(outputs)


def _checked(beta: float) -> float:
    if beta < 0:
        raise ValueError(f"the weight of the KL divergence must not be negative, got beta={beta}")
    return beta


def _uncertain_weights(network: EGNN) -> Posterior:
    """Make the weights of all message-passing layers variational; return their posterior."""
    layers = {
        "edge": _in_every_layer(network, "edge.first", "edge.second", "position.0", "position.2"),
        "node": _in_every_layer(network, "node.0", "node.2", "velocity.0", "velocity.2"),
    }
    return make_variational(network, layers, features={"edge": 3, "node": 1})


def _alpha(posterior: Posterior, network: EGNN, data: Trajectories) -> dict[str, Tensor]:
    """BLIP's alpha of every edge and node, inferred from the raw inputs of the network."""
    apart = (data.positions.unsqueeze(-2) - others(data.positions)).square().sum(-1, keepdim=True)
    q = data.charges.unsqueeze(-1)
    edge = torch.cat([apart, apart.sqrt(), q.unsqueeze(-2) * others(q)], -1)
    return posterior.infer({"edge": edge, "node": network.node_features(data.velocities, data.charges)})


class MCDropout(Method):
    """EGNN with dropout inside its message and update MLPs, in training and in prediction."""

    def __init__(self, config: EGNNConfig | None = None, *, share: float = 0.1) -> None:
        super().__init__()
        self.network = EGNN(config)
        self.dropout = add_dropout(self.network, _in_every_layer(self.network, "edge.second", "node.2"), share=share)

    def loss(self, batch: Trajectories, generator: torch.Generator, samples: int) -> Tensor:
        return (self._positions(batch, generator) - batch.target).square().mean()

    def draw(self, samples: int, seed: int) -> Sequence[Any]:
        return _generators(samples, seed)

    def run(self, data: Trajectories, draws: Sequence[Any]) -> Tensor:
        return torch.stack([self._positions(data, draw) for draw in draws])

    def _positions(self, data: Trajectories, generator: torch.Generator | None) -> Tensor:
        with contextlib.nullcontext() if generator is None else self.dropout.drawing(generator):
            return self.network(data.positions, data.velocities, data.charges)


def _in_every_layer(network: EGNN, *names: str) -> list[str]:
    return [f"layers.{i}.{name}" for i in range(network.config.layers) for name in names]


def _generators(samples: int, seed: int) -> list[torch.Generator]:
    """One generator per sample; it advances from batch to batch, so a seed repeats samples only on the same data."""
    seeds = np.random.SeedSequence(seed).generate_state(samples, np.uint64) >> 1
    return [torch.Generator().manual_seed(int(number)) for number in seeds]


class Ensemble(Method):
    """Several trained methods; samples alternate between members. A draw is (member number, draw of that member)."""

    def __init__(self, members: Sequence[Method]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.fixed_samples = len(members) if members[0].fixed_samples == 1 else None

    def loss(self, batch: Trajectories, generator: torch.Generator, samples: int) -> Tensor:
        raise TypeError("an ensemble has no loss; train its members separately")

    def draw(self, samples: int, seed: int) -> Sequence[Any]:
        if self.fixed_samples is None:
            return [(k % len(self.members), own) for k, own in enumerate(self._parts[0].draw(samples, seed))]
        if samples != self.fixed_samples:
            raise ValueError(
                f"an ensemble of {self.fixed_samples} members has {self.fixed_samples} samples, got samples={samples}"
            )
        return [(k, None) for k in range(samples)]

    def run(self, data: Trajectories, draws: Sequence[Any]) -> Tensor:
        if list(draws) == [None]:  # without noise: mean of the members
            return torch.cat([member.run(data, [None]) for member in self._parts]).mean(0, keepdim=True)
        draws_of = [[k for k, (number, _) in enumerate(draws) if number == i] for i in range(len(self.members))]
        outputs = [
            member.run(data, [draws[k][1] for k in own])
            for member, own in zip(self._parts, draws_of, strict=True)
            if own
        ]
        return torch.cat(outputs)[torch.tensor(list(chain(*draws_of))).argsort()]

    @property
    def _parts(self) -> list[Method]:
        return list(self.members)  # type: ignore[arg-type]  # ModuleList does not know the type of its modules


def leave_one_out(members: Sequence[Method]) -> list[Ensemble]:
    """All ensembles that leave out one member; from 4 trained networks, the triples of the paper."""
    if len(members) < 3:
        raise ValueError(f"leave-one-out ensembles need at least 3 members, got {len(members)}")
    return [Ensemble([m for j, m in enumerate(members) if j != i]) for i in range(len(members))]


def parameter_table(config: EGNNConfig | None = None, *, members: int = 3) -> list[tuple[str, int, float]]:
    """Name, number of parameters and ratio to EGNN, for EGNN, an ensemble and P-EGNN (appendix of the paper)."""
    plain, perturbed = (
        sum(p.numel() for p in method.parameters()) for method in (Deterministic(config), PEGNN(config))
    )
    counts = {"EGNN": plain, f"EGNN ensemble (K = {members})": members * plain, "P-EGNN": perturbed}
    return [(name, count, count / plain) for name, count in counts.items()]
