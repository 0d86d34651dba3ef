"""EGNN with velocities (Satorras et al. 2021), written for speed on small complete graphs.

    m_ij = phi_e(h_i, h_j, |x_i - x_j|^2, d_ij, q_i q_j)
    x_i <- x_i + mean_j (x_i - x_j) phi_x(m_ij) + phi_v(h_i) v_i
    h_i <- h_i + phi_h(h_i, sum_j m_ij)

Noise enters phi_e and phi_h only, so each sample is exactly E(3)-equivariant.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pmlip.noise.injection import Site
from pmlip.noise.split_linear import SplitInput, SplitLinear, split_input


@dataclass(frozen=True, kw_only=True)
class EGNNConfig:
    layers: int = 4
    width: int = 64
    node_input: str = "speed"  # "speed" |v_i| as in the published code, or "charge" as in the paper's text
    distance: str = "current"  # d_ij: "current" distance, or "start", the squared initial distance


@dataclass(frozen=True)
class Pairs:
    """The edges of a batch of graphs of any size. Without `Pairs`, graphs are complete and of equal size."""

    receiver: Tensor  # (edge,)
    sender: Tensor  # (edge,)


class EdgeMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = SplitLinear(2 * width + 3, width)
        self.second = nn.Linear(width, width)

    def forward(self, h: Tensor, edge: Tensor, pairs: Pairs | None) -> Tensor:
        if pairs is None:
            rows = SplitInput(((h, receivers), (h, others), (edge, None)))
        else:
            rows = split_input((h, pairs.receiver), (h, pairs.sender), (edge, None))
        return functional.silu(self.second(functional.silu(self.first(rows))))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = EdgeMLP(width)
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.position = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1, bias=False))
        self.velocity = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        last = self.position[-1]
        assert isinstance(last, nn.Linear)
        nn.init.xavier_uniform_(last.weight, gain=0.001)  # as published: initially, positions hardly change


class EGNN(nn.Module):
    """Predicts positions at a later time from positions, velocities and charges.

    Dense graphs: positions and velocities (..., particle, 3), charges (..., particle); all particles are neighbours.
    Graphs of any size: particles along the first axis, and edges as `pairs`.
    """

    def __init__(self, config: EGNNConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or EGNNConfig()
        if config.node_input not in ("speed", "charge"):
            raise ValueError(f"node_input must be 'speed' or 'charge', got {config.node_input!r}")
        if config.distance not in ("current", "start"):
            raise ValueError(f"distance must be 'current' or 'start', got {config.distance!r}")
        self.embedding = nn.Linear(1, config.width)
        self.layers = nn.ModuleList(Layer(config.width) for _ in range(config.layers))

    def sites(self, *, every_layer: bool = False) -> list[Site]:
        """The first layers of phi_e and phi_h; with every_layer, also their second layers."""
        kinds = {"edge.first": "edge", "node.0": "node"}
        if every_layer:
            kinds |= {"edge.second": "edge", "node.2": "node"}
        return [Site(f"layers.{i}.{name}", rows) for i in range(self.config.layers) for name, rows in kinds.items()]

    def node_features(self, velocities: Tensor, charges: Tensor) -> Tensor:
        """The raw input of each node, (..., particle, 1)."""
        if self.config.node_input == "charge":
            return charges.unsqueeze(-1)
        return velocities.square().sum(-1, keepdim=True).sqrt()

    def forward(self, positions: Tensor, velocities: Tensor, charges: Tensor, pairs: Pairs | None = None) -> Tensor:
        x, q = positions, charges.unsqueeze(-1)
        h = self.embedding(self.node_features(velocities, charges))
        product = q.unsqueeze(-2) * others(q) if pairs is None else q[pairs.receiver] * q[pairs.sender]
        start = None
        for depth, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            apart = x.unsqueeze(-2) - others(x) if pairs is None else x[pairs.receiver] - x[pairs.sender]
            square = apart.square().sum(-1, keepdim=True)
            start = square if start is None else start
            distance = square.sqrt() if self.config.distance == "current" else start.expand_as(square)
            edge = torch.cat([square, distance, product.expand_as(square)], -1)
            message = layer.edge(h, edge, pairs)
            pull = apart * layer.position(message)
            if pairs is None:
                x = x + pull.mean(-2) + layer.velocity(h) * velocities
            else:
                count = torch.bincount(pairs.receiver, minlength=len(x)).clamp(min=1).unsqueeze(-1)
                x = x + torch.zeros_like(x).index_add(0, pairs.receiver, pull) / count + layer.velocity(h) * velocities
            if depth + 1 < len(self.layers):  # the last update of h would not affect the output
                total = message.sum(-2) if pairs is None else torch.zeros_like(h).index_add(0, pairs.receiver, message)
                h = h + layer.node(torch.cat([h.expand_as(total), total], -1))
        return x


def receivers(values: Tensor) -> Tensor:
    """The values of each particle i, shaped to broadcast with `others`: (..., n, c) -> (..., n, 1, c)."""
    return values.unsqueeze(-2)


def others(values: Tensor) -> Tensor:
    """For each particle i, the values of i+1, ..., i+n-1 (mod n): (..., n, c) -> (..., n, n-1, c), a strided view."""
    count = values.shape[-2]
    circle = torch.cat([values, values[..., :-1, :]], dim=-2)
    return circle[..., 1:, :].unfold(-2, count - 1, 1).movedim(-1, -2)


def load_published(model: EGNN, state: dict[str, Tensor]) -> None:
    """Load a state dict of the public implementation's `EGNN_vel` (4 layers, width 64, `recurrent=True`).

    Keys, public -> pmlip: embedding -> embedding; gcl_I.edge_mlp.{0,2} -> layers.I.edge.{first,second};
    gcl_I.node_mlp -> layers.I.node; gcl_I.coord_mlp -> layers.I.position; gcl_I.coord_mlp_vel -> layers.I.velocity.
    The public edge input is [h_i, h_j, |x_i - x_j|^2, q_i q_j, start]; here it is [.., |x_i - x_j|^2, start, q_i q_j].
    """
    renamed = {}
    names = {
        "edge_mlp.0": "edge.first",
        "edge_mlp.2": "edge.second",
        "node_mlp": "node",
        "coord_mlp_vel": "velocity",
        "coord_mlp": "position",
    }
    for key, value in state.items():
        parts = key.split(".")
        if parts[0] == "embedding":
            renamed[key] = value
            continue
        rest = ".".join(parts[1:])
        theirs = next((name for name in names if rest.startswith(name + ".")), None)
        if not parts[0].startswith("gcl_") or theirs is None:
            raise ValueError(f"{key!r} is not a parameter of the public EGNN_vel")
        ours = names[theirs]
        if ours == "edge.first" and rest.endswith("weight"):
            value = torch.cat([value[:, :-2], value[:, -1:], value[:, -2:-1]], dim=1)
        renamed[f"layers.{parts[0].removeprefix('gcl_')}.{ours}{rest.removeprefix(theirs)}"] = value
    model.load_state_dict(renamed)
