"""Validate input structures (ASE Atoms)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from scipy.spatial import cKDTree

# Limits that no real structure comes near.
LARGEST = 1e5  # Å, of positions and cell vectors
THINNEST = 0.5  # Å between opposite faces of a cell
FLATTEST = 1e-3  # smallest singular value of the directions of the cell vectors, roughly an angle in radians
DENSEST = 2.0  # atoms per Å^3; diamond has 0.18
CLOSEST = 0.01  # Å between two atoms
ELECTRONS = ("charge", "spin")  # keys of `info`

T = TypeVar("T")
Progress = Callable[[int, int], None]  # progress(done, total) counts structures


class StructureError(ValueError):
    """A structure cannot be used; the message names its index, its formula and the problem."""

    def __init__(self, atoms: Atoms, index: int, problem: str) -> None:
        super().__init__(f"structure {index} ({_formula(atoms)}): {problem}")
        self.atoms, self.index, self.problem = atoms, index, problem

    def __reduce__(self) -> tuple[type["StructureError"], tuple[Atoms, int, str]]:
        # Worker processes pickle their errors. By default, unpickling would pass only the message to __init__.
        return StructureError, (self.atoms, self.index, self.problem)

    def after(self, start: int) -> "StructureError":
        """Return the same error with its index increased by `start`."""
        return StructureError(self.atoms, start + self.index, self.problem)


@contextlib.contextmanager
def numbered_from(start: int) -> Iterator[None]:
    """Errors inside the block, about structures number `start` and following, give their numbers among all."""
    try:
        yield
    except StructureError as error:
        raise error.after(start) from None


@contextlib.contextmanager
def in_file(path: str | Path, structures: Sequence[Atoms] | None = None) -> Iterator[None]:
    """Prefix errors about structures with the path of their file.

    structures: all structures of the file. Pass them if the code inside works on a selection: the error then gives the
    index in the file, and an error about a structure of another file is not changed.
    """
    try:
        yield
    except StructureError as error:
        if structures is None:
            raise ValueError(f"{path}: {error}") from error
        places = [index for index, atoms in enumerate(structures) if atoms is error.atoms]
        if not places:
            raise
        raise ValueError(f"{path}: {StructureError(error.atoms, places[0], error.problem)}") from error
    except ValueError as error:
        if structures is not None:
            raise
        raise ValueError(f"{path}: {error}") from error


def as_structures(structures: Atoms | Iterable[Atoms]) -> list[Atoms]:
    """Return one or many structures as a list; raise an error for the first invalid one."""
    listed = [structures] if isinstance(structures, Atoms) else list(structures)
    if not listed:
        raise ValueError("no structures were given: the list is empty")
    for index, atoms in enumerate(listed):
        if not isinstance(atoms, Atoms):
            raise TypeError(f"structure {index} is a {type(atoms).__name__}; structures must be ase.Atoms")
        if len(atoms) == 0:
            raise StructureError(atoms, index, "it has no atoms")
        if problem := _problem(atoms):
            raise StructureError(atoms, index, problem)
        for name in ELECTRONS:
            if not _is_number(atoms.info.get(name, 0)):
                raise StructureError(atoms, index, f"its {name} must be a number, got {atoms.info[name]!r}")
    return listed


def _formula(atoms: Atoms) -> str:
    return atoms.get_chemical_formula() if _known_elements(atoms).all() else f"{len(atoms)} atoms"


def _known_elements(atoms: Atoms) -> np.ndarray:
    return (atoms.numbers > 0) & (atoms.numbers < len(chemical_symbols))


def _problem(atoms: Atoms) -> str | None:
    """What makes a structure meaningless for every potential; None if nothing does.

    Such structures cost unlimited time and memory in a neighbour search, or give numbers that mean nothing.
    """
    if not (known := _known_elements(atoms)).all():
        atom = int((~known).argmax())
        return f"atom {atom} has the atomic number {atoms.numbers[atom]}; allowed: 1 to {len(chemical_symbols) - 1}"
    if not np.isfinite(atoms.positions).all() or not np.isfinite(atoms.cell.array).all():
        return "a position or a cell vector is NaN or infinite"
    if (largest := max(abs(atoms.positions).max(), abs(atoms.cell.array).max())) > LARGEST:
        return f"a position or a cell vector is {largest:.3g} Å long; allowed: up to {LARGEST:g} Å. Check the unit"
    return _problem_of_cell(atoms) or _problem_of_distances(atoms)


def _problem_of_cell(atoms: Atoms) -> str | None:
    vectors = atoms.cell.array[atoms.cell.array.any(axis=1)]
    if not len(vectors):
        return None
    lengths = np.linalg.norm(vectors, axis=1)
    if np.linalg.svd(vectors / lengths[:, None], compute_uv=False).min() < FLATTEST:
        return "its cell vectors lie in one plane or on one line; check the cell"
    thickness = (1 / np.linalg.norm(np.linalg.pinv(vectors), axis=0)).min()
    if thickness < THINNEST:
        return f"its cell is only {thickness:.3g} Å thick; allowed: {THINNEST} Å or more. Check the unit"
    if atoms.pbc.all() and len(vectors) == 3 and len(atoms) > DENSEST * atoms.cell.volume:
        return (
            f"it has {len(atoms) / atoms.cell.volume:.3g} atoms per Å^3; allowed: up to {DENSEST:g}. Check the unit "
            "of the cell"
        )
    return None


def _problem_of_distances(atoms: Atoms) -> str | None:
    if len(atoms) < 2:
        return None
    # the distance of two atoms is at least their distance along the normal of each pair of faces
    cell = atoms.cell.complete()
    thickness = 1 / np.linalg.norm(np.linalg.inv(cell.array), axis=0)
    periodic = atoms.pbc & atoms.cell.array.any(axis=1)
    along = cell.scaled_positions(atoms.positions)
    along = np.where(periodic, (along % 1.0).clip(max=1 - 1e-15), along - along.min(axis=0)) * thickness
    size = np.where(periodic, thickness * (1 + 1e-15), 0.0)  # 0: not periodic
    pairs = cKDTree(along, boxsize=size).query_pairs(CLOSEST, p=np.inf, output_type="ndarray")
    if not len(pairs):
        return None
    apart = atoms.positions[pairs[:, 1]] - atoms.positions[pairs[:, 0]]
    turns = np.where(periodic, cell.scaled_positions(apart).round(), 0.0)
    distances = np.linalg.norm(apart - turns @ cell.array, axis=1)
    if distances.min() >= CLOSEST:
        return None
    first, second = pairs[distances.argmin()]
    return f"atoms {first} and {second} are {distances.min():.2g} Å apart; remove one of them"


def _is_number(value: object) -> bool:
    try:
        return value is None or np.asarray(value, dtype=float).size == 1
    except (TypeError, ValueError):
        return False


def system_index(structures: Sequence[Atoms]) -> torch.Tensor:
    """Return the index of the structure that each atom belongs to, (atom,)."""
    sizes = torch.tensor([len(atoms) for atoms in structures])
    return torch.repeat_interleave(torch.arange(len(structures)), sizes)


def subsample(structures: Sequence[T], count: int) -> list[T]:
    """Return `count` structures, or indices, evenly spaced over the list, or all if it has fewer."""
    count = min(count, len(structures))
    return [structures[i * len(structures) // count] for i in range(count)]


def electrons(atoms: Atoms) -> dict[str, float]:
    """Return the charge and spin stored in `info`; a missing key or None is left out."""
    return {name: float(atoms.info[name]) for name in ELECTRONS if atoms.info.get(name) is not None}
