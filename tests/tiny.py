"""A small E(3)-equivariant potential with an adapter: real message passing that tests can run in double precision."""

import torch
from ase.calculators.calculator import Calculator, all_changes
from torch import nn

from pmlip.backbones.base import Backbone, Graph, Readout
from pmlip.noise.injection import Site

CUTOFF = 4.0


class TinyNetwork(nn.Module):
    """Two layers of messages over distances; forces as sums of edge vectors times scalars, so not conservative."""

    def __init__(self, width=8, first=lambda inputs, width: nn.Linear(inputs, width)):
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.message = nn.ModuleList(nn.Sequential(first(2 * width + 1, width), nn.SiLU()) for _ in range(2))
        self.update = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(2)
        )
        self.energy = nn.Linear(width, 1)
        self.force = nn.Linear(width, 1)
        self.register_buffer("reference", torch.zeros(100))

    def forward(self, numbers, positions, edge, system, systems):
        sender, receiver = edge
        vector = positions[receiver] - positions[sender]
        square = vector.square().sum(-1, keepdim=True)
        envelope = (1 - square / CUTOFF**2).clamp(min=0).square()
        h = self.embedding(numbers)
        for message, update in zip(self.message, self.update, strict=True):
            m = message(torch.cat([h[sender], h[receiver], square], -1)) * envelope
            h = h + update(torch.cat([h, torch.zeros_like(h).index_add(0, receiver, m)], -1))
        energy = h.new_zeros(systems).index_add(0, system, self.energy(h)[:, 0] + self.reference[numbers])
        forces = torch.zeros_like(positions).index_add(0, receiver, vector * self.force(m))
        return energy, forces


class TinyBackbone(Backbone):
    name = "tiny"
    equivariant = True
    conservative = False

    def sites(self):
        return [
            *(Site(f"message.{i}", "edge") for i in range(2)),
            *(Site(f"update.{i}", "node") for i in range(2)),
        ]

    def atom_of_row(self, graph):
        return {"edge": graph.batch["edge"][1]}

    def readouts(self):
        return [Readout("energy")]

    def single(self, atoms, index):
        like = self.module.energy.weight
        close = torch.from_numpy(atoms.get_all_distances()) < CUTOFF
        edge = (close & ~torch.eye(len(atoms), dtype=torch.bool)).nonzero().T
        batch = {
            "numbers": torch.tensor(atoms.numbers),
            "positions": torch.tensor(atoms.positions).to(like),
            "edge": edge,
        }
        rows = {"node": torch.zeros(len(atoms), dtype=torch.long), "edge": torch.zeros_like(edge[0])}
        return Graph(batch, rows, 1, batch["numbers"])

    def join_batches(self, batches):
        starts = [0, *torch.tensor([len(batch["numbers"]) for batch in batches]).cumsum(0).tolist()]
        return {
            "numbers": torch.cat([batch["numbers"] for batch in batches]),
            "positions": torch.cat([batch["positions"] for batch in batches]),
            "edge": torch.cat([batch["edge"] + start for batch, start in zip(batches, starts, strict=False)], 1),
        }

    def row_features(self, graph):
        sender, receiver = graph.batch["edge"]
        apart = graph.batch["positions"][receiver] - graph.batch["positions"][sender]
        return {"node": graph.batch["numbers"][:, None].to(apart), "edge": apart.norm(dim=-1, keepdim=True)}

    def forward(self, graph):
        energy, forces = self.module(**graph.batch, system=graph.rows["node"], systems=graph.systems)
        return {"energy": energy.double(), "forces": forces}

    @property
    def elements(self):
        return range(1, 100)

    def references(self):
        return dict(enumerate(self.module.reference.tolist()))

    def shift_references(self, offsets):
        for number, offset in offsets.items():
            self.module.reference[number] += offset

    def calculator(self):
        return TinyCalculator(self)

    def save(self, path):
        torch.save(self.module.state_dict(), path)


class TinyCalculator(Calculator):
    implemented_properties = ["energy", "forces"]  # noqa: RUF012  ASE declares it like this

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        with torch.no_grad():
            outputs = self.backbone(self.backbone.graph([self.atoms]))
        self.results = {"energy": outputs["energy"].item(), "forces": outputs["forces"].numpy()}


def tiny_backbone(*, seed=0, dtype=torch.float64, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyBackbone(TinyNetwork(**options).to(dtype), "test")
