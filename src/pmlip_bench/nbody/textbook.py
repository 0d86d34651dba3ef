"""EGNN and the simulation written directly from the formulas: references for tests and speed measurements.

The parameters of the network have the names of `EGNN_vel` in the public implementation.
"""

import numpy as np
import torch
from torch import Tensor, nn

from pmlip.nbody.egnn import Pairs
from pmlip.nbody.simulate import LARGEST_FORCE, TIME_STEP


class TextbookLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge_mlp = nn.Sequential(nn.Linear(2 * width + 3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.node_mlp = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.coord_mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1, bias=False))
        self.coord_mlp_vel = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, h: Tensor, x: Tensor, v: Tensor, edge: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        i, j = pairs.receiver, pairs.sender
        apart = x[i] - x[j]
        square = apart.square().sum(-1, keepdim=True)
        message = self.edge_mlp(torch.cat([h[i], h[j], square, edge], -1))
        pull = torch.zeros_like(x).index_add(0, i, apart * self.coord_mlp(message))
        count = torch.zeros_like(x[:, :1]).index_add(0, i, torch.ones_like(square))
        x = x + pull / count + self.coord_mlp_vel(h) * v
        total = torch.zeros_like(h).index_add(0, i, message)
        return h + self.node_mlp(torch.cat([h, total], -1)), x


class TextbookEGNN(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = layers
        self.embedding = nn.Linear(1, width)
        for i in range(layers):
            self.add_module(f"gcl_{i}", TextbookLayer(width))

    def forward(self, positions: Tensor, velocities: Tensor, charges: Tensor, pairs: Pairs) -> Tensor:
        """Final positions (particle, 3), from positions and velocities (particle, 3) and charges (particle,).

        Node and edge inputs are the published ones.
        """
        h = self.embedding(velocities.norm(dim=-1, keepdim=True))
        start = (positions[pairs.receiver] - positions[pairs.sender]).square().sum(-1, keepdim=True)
        edge = torch.cat([(charges[pairs.receiver] * charges[pairs.sender])[:, None], start], -1)
        x = positions
        for i in range(self.layers):
            h, x = self.get_submodule(f"gcl_{i}")(h, x, velocities, edge, pairs)
        return x


def complete_pairs(graphs: int, particles: int) -> Pairs:
    """All ordered pairs of different particles within each graph; all graphs have the same size."""
    i, j = (~torch.eye(particles, dtype=torch.bool)).nonzero().T
    start = particles * torch.arange(graphs)[:, None]
    return Pairs((start + i).flatten(), (start + j).flatten())


def simulate_plainly(
    x: np.ndarray, v: np.ndarray, q: np.ndarray, *, steps: int, time_step: float = TIME_STEP
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and velocities of one trajectory after `steps` steps, in a plain Python loop over vectors."""

    def forces() -> np.ndarray:
        apart = x[:, None] - x
        distance = np.sqrt((apart**2).sum(-1))
        np.fill_diagonal(distance, 1.0)
        strength = q[:, None] * q / distance**3
        return np.clip((strength[..., None] * apart).sum(1), -LARGEST_FORCE, LARGEST_FORCE)

    x, v = x.copy(), v + time_step * forces()
    for step in range(1, steps + 1):
        x += time_step * v
        if step < steps:
            v += time_step * forces()
    return x, v
