"""What pmlip asks of a potential."""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import Calculator
from torch import Tensor, nn

from pmlip.noise.injection import Site


@dataclass(frozen=True)
class Graph:
    """A batch of structures in a backbone's own form."""

    batch: Any  # the backbone's own; nobody else looks inside
    rows: Mapping[str, Tensor]  # kind of row ("node" always, "edge", "angle", ...) -> system of each row
    systems: int


class Backbone(nn.Module, ABC):
    """A potential behind one interface. `tests/contract.py` says what every backbone must satisfy.

    Each file in this folder has a subclass of this and a function
    `load(variant, *, weights, device) -> Backbone`; the name of the file is the name of the backbone.
    """

    name: str  # of the file
    equivariant: bool  # whether rotating a structure rotates its forces exactly
    conservative: bool  # whether forces are the gradient of the energy
    rate = 1e-4  # learning rate for fine-tuning; a potential for which another was found to be better says so

    def __init__(self, module: nn.Module, variant: str) -> None:
        super().__init__()
        self.module = module  # the package's own model
        self.variant = variant

    def check(self, structures: Sequence[Atoms], indices: Sequence[int]) -> None:
        """Refuse structures that the potential cannot take, before hours of work."""
        for index in indices:
            self.single(structures[index], index)

    @abstractmethod
    def sites(self) -> Sequence[Site]:
        """The first linear layer of each message and update MLP, by its name inside `self.module`."""

    def mlps(self) -> list[list[Site]]:
        """All linear layers of each message and update MLP, its first one (the site) first."""
        found = []
        for site in self.sites():
            named = self.module.get_submodule(site.name)
            # a site may name its layer, or the MLP that begins with it
            mlp = site.name.rpartition(".")[0] if isinstance(named, nn.Linear) else site.name
            layers = [
                Site(f"{mlp}.{name}", site.rows)
                for name, layer in self.module.get_submodule(mlp).named_modules()
                if isinstance(layer, nn.Linear)
            ]
            if not layers:
                raise ValueError(f"{site.name} of {self.name} is not part of an MLP of linear layers")
            found.append(layers)
        return found

    @property
    def _like(self) -> Tensor:
        """A parameter, for its device and precision."""
        parameter: Tensor = next(self.module.parameters())
        return parameter

    def row_features(self, graph: "Graph") -> dict[str, Tensor]:
        """Raw features of the rows of each kind that sites have, invariant to rotation: (row, feature)."""
        raise ValueError(f"the adapter of {self.name} gives no raw features of rows, which this method needs")

    @abstractmethod
    def single(self, atoms: Atoms, index: int) -> Graph:
        """One structure as a batch on the model's device; index: its number, for a StructureError."""

    @abstractmethod
    def join_batches(self, batches: Sequence[Any]) -> Any:
        """Several batches of this backbone as one, their systems one after the other."""

    def graph(self, structures: Sequence[Atoms]) -> Graph:
        """Structures as one batch on the model's device; refuses structures that the potential cannot take."""
        return self.join([self.single(atoms, index) for index, atoms in enumerate(structures)])

    def join(self, graphs: Sequence[Graph]) -> Graph:
        """Several graphs as one, without building neighbour lists again."""
        *starts, systems = itertools.accumulate((graph.systems for graph in graphs), initial=0)
        rows = {
            kind: torch.cat([graph.rows[kind] + start for graph, start in zip(graphs, starts, strict=True)])
            for kind in graphs[0].rows
        }
        return Graph(self.join_batches([graph.batch for graph in graphs]), rows, systems)

    def repeat(self, graph: Graph, copies: int) -> Graph:
        """The whole batch `copies` times, one copy after the other."""
        return self.join([graph] * copies)

    @abstractmethod
    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """energy (system,) in double precision, forces (atom, 3), stress (system, 6): eV, Å, ASE's signs.

        Forces that are gradients are part of the autograd graph only where gradients are enabled.
        """

    @property
    @abstractmethod
    def elements(self) -> Sequence[int]:
        """The atomic numbers it knows."""

    @abstractmethod
    def shift_references(self, offsets: Mapping[int, float]) -> None:
        """Add to the energy of every atom of these elements (atomic number -> eV), in the package's own references."""

    def shift_all(self, energy: float) -> None:
        """Add to the energy of every atom, in eV."""
        self.shift_references(dict.fromkeys(self.elements, energy))

    @abstractmethod
    def calculator(self) -> Calculator:
        """The package's own ASE calculator for this model."""

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write the model in the package's own file format."""


def weights_hash(module: nn.Module) -> str:
    """A fingerprint of all parameters and buffers: their names, shapes and values, in whatever precision."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().double().numpy().tobytes())
    return digest.hexdigest()


def conservative_outputs(
    graph: Graph,
    *,
    positions: Tensor,
    cell: Tensor,
    volume: Tensor,
    energy: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Energies, and forces and stress as their gradients, each in the precision of the positions but the energy.

    energy(positions, cell) gives that of each system (system,) for positions (node, 3) and cells (system, 3, 3), which
    are leaves of their own in every call. It should take rows of them by index_select: the gradient of x[index] differs
    in rounding from call to call where several threads add to a row. volume (system,) is NaN for a structure without a
    cell, and so is its stress then. The outputs are part of the autograd graph only where gradients are enabled.
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        positions = positions.detach().requires_grad_()
        strain = torch.zeros_like(cell).requires_grad_()
        deformation = torch.eye(3).to(strain) + strain
        moved = times_own(positions, deformation, graph.rows["node"])
        total = energy(moved, cell @ deformation)
        gradient, virial = torch.autograd.grad(
            total.sum(), [positions, strain], create_graph=differentiable, materialize_grads=True
        )
        # NaN must come last: dividing by it would make the gradient of every parameter NaN
        stress = virial / volume.nan_to_num(nan=1.0)[:, None, None]
        voigt = (stress + stress.mT).flatten(1)[:, [0, 4, 8, 5, 2, 1]] / 2
        voigt = voigt.masked_fill(volume.isnan()[:, None], torch.nan)
    outputs = {"energy": total, "forces": -gradient, "stress": voigt}
    return outputs if differentiable else {name: value.detach() for name, value in outputs.items()}


def times_own(rows: Tensor, matrices: Tensor, system: Tensor) -> Tensor:
    """Each row (row, 3) times the matrix of its system, out of (system, 3, 3)."""
    return (rows[:, None] @ matrices.index_select(0, system))[:, 0]


def distance_features(distances: Tensor, largest: float, count: int = 16) -> Tensor:
    """Gaussians around `count` distances up to the largest, (row, count)."""
    centres = torch.linspace(0, largest, count).to(distances)
    return torch.exp(-(((distances[:, None] - centres) * count / largest) ** 2))
