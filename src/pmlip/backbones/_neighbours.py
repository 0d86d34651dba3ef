"""Neighbour lists for backbones that take a plain list of edges."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from matscipy.neighbours import neighbour_list
from torch import Tensor

from pmlip.backbones.base import Graph, conservative_outputs, times_own
from pmlip.structures.atoms import StructureError


@dataclass(frozen=True)
class Batch:
    species: Tensor  # (node,) index of the element in the potential's list of elements
    positions: Tensor  # (node, 3), double
    cell: Tensor  # (system, 3, 3), double
    volume: Tensor  # (system,); NaN for a structure without a cell
    image: Tensor  # (edge, 3) periodic image of the neighbour, in cell vectors
    edge: Tensor  # (edge, 2) node indices of centre and neighbour


def build_graph(
    atoms: Atoms, index: int, *, cutoff: float, species: Mapping[int, int], like: Tensor, potential: str
) -> Graph:
    """Build the graph of one structure on the device of `like`.

    species: atomic number -> index, for the elements of the potential. potential: its name for error messages.
    """
    for atom in atoms:
        if atom.number not in species:
            known = ", ".join(chemical_symbols[number] for number in species)
            raise StructureError(atoms, index, f"{potential} does not know {atom.symbol}, only {known}")
    built = _single(atoms, index, cutoff, species)
    batch = Batch(**{name: value.to(like.device) for name, value in vars(built).items()})
    rows = {"node": torch.zeros_like(batch.species), "edge": torch.zeros_like(batch.edge[:, 0])}
    return Graph(batch, rows, 1, torch.tensor(atoms.numbers).to(like.device))


def atom_of_row(graph: Graph) -> dict[str, Tensor]:
    """Return the atom that each edge belongs to, its centre."""
    batch: Batch = graph.batch
    return {"edge": batch.edge[:, 0]}


def outputs_by_gradient(graph: Graph, energy: Callable[[Tensor], Tensor], like: Tensor) -> dict[str, Tensor]:
    """Return energy, forces and stress of a function energy(edge vectors) -> (system,).

    Edge vectors are computed in double precision, then cast to the precision of `like`. Forces and stress have that
    precision too; the energy keeps its own.
    """
    batch: Batch = graph.batch

    def at(positions: Tensor, cell: Tensor) -> Tensor:
        images = times_own(batch.image, cell, graph.rows["edge"])
        centre, neighbour = (positions.index_select(0, end) for end in batch.edge.unbind(1))
        return energy((neighbour - centre + images).to(like.dtype))

    outputs = conservative_outputs(graph, positions=batch.positions, cell=batch.cell, volume=batch.volume, energy=at)
    return {name: value if name == "energy" else value.to(like.dtype) for name, value in outputs.items()}


def _single(atoms: Atoms, index: int, cutoff: float, species: Mapping[int, int]) -> Batch:
    if (atoms.pbc & ~atoms.cell.array.any(axis=1)).any():
        raise StructureError(atoms, index, "it is periodic along an axis without a cell vector")
    # axes without a cell vector are not periodic, so an arbitrary vector is correct
    centre, neighbour, image = neighbour_list(
        "ijS", positions=atoms.positions, cell=atoms.cell.complete().array, pbc=atoms.pbc, cutoff=cutoff
    )
    return Batch(
        species=torch.tensor([species[number] for number in atoms.numbers]),
        positions=torch.tensor(atoms.positions),
        cell=torch.tensor(atoms.cell.array)[None],
        volume=torch.tensor([atoms.cell.volume if atoms.cell.rank == 3 else torch.nan], dtype=torch.float64),
        image=torch.from_numpy(image).double(),
        edge=torch.from_numpy(np.stack([centre, neighbour], axis=1)).long(),
    )


def join(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches and shift the node indices of their edges."""
    joined = Batch(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Batch)})
    starts = [0, *np.cumsum([len(part.species) for part in parts[:-1]]).tolist()]
    return replace(joined, edge=torch.cat([part.edge + start for part, start in zip(parts, starts, strict=True)]))
