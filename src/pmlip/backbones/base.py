"""The interface of a backbone, and helper functions for adapters."""

import contextlib
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
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
    """A batch of structures in the backbone's format."""

    batch: Any  # private to the backbone
    rows: Mapping[str, Tensor]  # kind of row ("node" always, "edge", "angle", ...) -> system of each row
    systems: int
    numbers: Tensor  # (atom,) atomic numbers


@dataclass(frozen=True)
class Readout:
    """A module that computes energies from the features of the atoms, its first argument (atom, feature)."""

    name: str  # relative to the package's model
    scalars: int | None = None  # number of leading features that do not change under rotation; None: all


class Backbone(nn.Module, ABC):
    """Base class of all potentials. `tests/contract.py` tests the properties that every backbone must have.

    Each adapter file defines a subclass and a function `load(variant, *, weights, device) -> Backbone`. The file name
    is the name of the backbone.
    """

    name: str  # name of the adapter file
    equivariant: bool  # whether rotating a structure rotates its forces exactly
    conservative: bool  # whether forces are the gradient of the energy
    rate = 1e-4  # default learning rate for fine-tuning; subclasses override it with a tuned value
    tangent_cover = "all"  # weights that tangent samples change by default, one of `pmlip.tangent.COVERS`

    def __init__(self, module: nn.Module, variant: str) -> None:
        super().__init__()
        self.module = module  # the package's model
        self.variant = variant

    def check(self, structures: Sequence[Atoms], indices: Sequence[int]) -> None:
        """Raise a StructureError for the first structure that the potential does not support.

        Called before long runs, so that they do not fail halfway.
        """
        for index in indices:
            self.single(structures[index], index)

    @abstractmethod
    def sites(self) -> Sequence[Site]:
        """Return the first linear layer of each message and update MLP; names are relative to `self.module`."""

    def mlps(self) -> list[list[Site]]:
        """Return all linear layers of each message and update MLP; the site is the first layer of each list."""
        found = []
        for site in self.sites():
            named = self.module.get_submodule(site.name)
            # a site names either its layer or the MLP whose first layer it is
            mlp = site.name.rpartition(".")[0] if isinstance(named, nn.Linear) else site.name
            layers = [
                Site(f"{mlp}.{name}", site.rows)
                for name, layer in self.module.get_submodule(mlp).named_modules()
                if isinstance(layer, nn.Linear)
            ]
            if not layers:
                raise ValueError(f"site {site.name!r} of {self.name} is not part of an MLP of nn.Linear layers")
            found.append(layers)
        return found

    @abstractmethod
    def atom_of_row(self, graph: "Graph") -> Mapping[str, Tensor]:
        """Return the atom that each row belongs to, for the kinds of rows that sites have besides "node"."""

    @abstractmethod
    def readouts(self) -> Sequence[Readout]:
        """Return the modules whose inputs are the latent features of the atoms."""

    def heads(self) -> list[str]:
        """Return the names of the modules that compute the outputs from the features of the atoms."""
        return [readout.name for readout in self.readouts()]

    @property
    def _like(self) -> Tensor:
        """Return a parameter that has the device and precision of the model."""
        parameter: Tensor = next(self.module.parameters())
        return parameter

    def row_features(self, graph: "Graph") -> dict[str, Tensor]:
        """Return rotation-invariant input features (row, feature) for each kind of row that sites have."""
        raise ValueError(
            f"backbone {self.name!r} does not implement row_features, which this method needs; use another backbone"
        )

    @abstractmethod
    def single(self, atoms: Atoms, index: int) -> Graph:
        """Build the graph of one structure on the model's device; index: its number in a StructureError."""

    @abstractmethod
    def join_batches(self, batches: Sequence[Any]) -> Any:
        """Concatenate batches of this backbone, in order."""

    def graph(self, structures: Sequence[Atoms]) -> Graph:
        """Build one batch on the model's device; raise a StructureError if a structure is not supported."""
        return self.join([self.single(atoms, index) for index, atoms in enumerate(structures)])

    def join(self, graphs: Sequence[Graph]) -> Graph:
        """Concatenate graphs without a new neighbour search."""
        *starts, systems = itertools.accumulate((graph.systems for graph in graphs), initial=0)
        rows = {
            kind: torch.cat([graph.rows[kind] + start for graph, start in zip(graphs, starts, strict=True)])
            for kind in graphs[0].rows
        }
        numbers = torch.cat([graph.numbers for graph in graphs])
        return Graph(self.join_batches([graph.batch for graph in graphs]), rows, systems, numbers)

    def repeat(self, graph: Graph, copies: int) -> Graph:
        """Concatenate `copies` copies of a batch."""
        return self.join([graph] * copies)

    @abstractmethod
    def forward(self, graph: Graph) -> dict[str, Tensor]:
        """Return energy (system,) in double precision, forces (atom, 3), stress (system, 6): eV, Å, ASE's signs.

        Conservative forces are part of the autograd graph only if gradients are enabled.
        """

    @property
    @abstractmethod
    def elements(self) -> Sequence[int]:
        """Atomic numbers of the elements that the potential supports."""

    @abstractmethod
    def references(self) -> dict[int, float]:
        """Return the energy (eV) of each element that the potential adds for each atom; {} if it has none."""

    @abstractmethod
    def shift_references(self, offsets: Mapping[int, float]) -> None:
        """Add offsets (atomic number -> eV per atom) to the reference energies that the package stores."""

    def shift_all(self, energy: float) -> None:
        """Add `energy` (eV per atom) to the reference energy of every element."""
        self.shift_references(dict.fromkeys(self.elements, energy))

    @abstractmethod
    def calculator(self) -> Calculator:
        """Return the package's ASE calculator for this model."""

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write the model in the package's file format."""


def weights_hash(module: nn.Module) -> str:
    """Return a hash of all parameters and buffers (names, shapes, values) that does not depend on the precision."""
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
    """Return energies, and forces and stress as their gradients in the precision of the positions.

    energy(positions, cell) returns the energy of each system (system,) for positions (node, 3) and cells
    (system, 3, 3). It should gather rows with index_select: the gradient of x[index] is not reproducible to the last
    digit when several threads add to a row. volume (system,) is NaN for a structure without a cell; its stress is NaN
    too. The outputs are part of the autograd graph only if gradients are enabled.
    """
    watched, differentiable = _watched.get(), torch.is_grad_enabled()
    with torch.enable_grad():
        positions = positions.detach().requires_grad_()
        strain = torch.zeros_like(cell).requires_grad_()
        deformation = torch.eye(3).to(strain) + strain
        moved = times_own(positions, deformation, graph.rows["node"])
        total = energy(moved, cell @ deformation)
        gradient, virial = torch.autograd.grad(
            total.sum(),
            [positions, strain],
            create_graph=differentiable and watched is None,
            retain_graph=differentiable,
            materialize_grads=True,
        )
        outputs = {"energy": total, "forces": -gradient, "stress": stress_of(virial, volume)}
    if watched is not None:
        watched.append(Energies(total, positions, strain, volume))
    return outputs if differentiable else {name: value.detach() for name, value in outputs.items()}


@dataclass(frozen=True)
class Energies:
    """The energies of a batch, and the variables that they depend on."""

    total: Tensor  # (system,)
    positions: Tensor  # (node, 3)
    strain: Tensor  # (system, 3, 3)
    volume: Tensor  # (system,)


_watched: ContextVar[list[Energies] | None] = ContextVar("watched", default=None)


@contextlib.contextmanager
def watch_energies() -> Iterator[list[Energies]]:
    """Collect the energies of conservative potentials in the passes inside the block; the list stays empty for others.

    Forces and stress of these passes are then not part of the autograd graph, but the energies are.
    """
    found: list[Energies] = []
    token = _watched.set(found)
    try:
        yield found
    finally:
        _watched.reset(token)


def stress_of(virial: Tensor, volume: Tensor) -> Tensor:
    """Return the stress (system, 6) in Voigt order; virial (system, 3, 3) is the derivative of the energy by strain."""
    # set NaN last: dividing by a NaN volume would make all gradients NaN
    stress = virial / volume.nan_to_num(nan=1.0)[:, None, None]
    voigt = (stress + stress.mT).flatten(1)[:, [0, 4, 8, 5, 2, 1]] / 2
    return voigt.masked_fill(volume.isnan()[:, None], torch.nan)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; restores the mode of every submodule at its end."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def times_own(rows: Tensor, matrices: Tensor, system: Tensor) -> Tensor:
    """Multiply each row (row, 3) by the matrix (system, 3, 3) of its system."""
    return (rows[:, None] @ matrices.index_select(0, system))[:, 0]


def distance_features(distances: Tensor, largest: float, count: int = 16) -> Tensor:
    """Return Gaussian basis functions of the distances, with `count` centres from 0 to `largest`: (row, count)."""
    centres = torch.linspace(0, largest, count).to(distances)
    return torch.exp(-(((distances[:, None] - centres) * count / largest) ** 2))
