"""Validate input structures (ASE Atoms)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from ase import Atoms

ELECTRONS = ("charge", "spin")  # keys of `info`

T = TypeVar("T")
Progress = Callable[[int, int], None]  # progress(done, total) counts structures


class StructureError(ValueError):
    """A structure cannot be used; the message names its index, its formula and the problem."""

    def __init__(self, atoms: Atoms, index: int, problem: str) -> None:
        super().__init__(f"structure {index} ({atoms.get_chemical_formula()}): {problem}")
        self.atoms, self.index, self.problem = atoms, index, problem

    def __reduce__(self) -> tuple[type["StructureError"], tuple[Atoms, int, str]]:
        # Worker processes pickle their errors. By default, unpickling would pass only the message to __init__.
        return StructureError, (self.atoms, self.index, self.problem)

    def after(self, start: int) -> "StructureError":
        """Return the same error with its index increased by `start`."""
        return StructureError(self.atoms, start + self.index, self.problem)


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
        if not np.isfinite(atoms.positions).all() or not np.isfinite(atoms.cell.array).all():
            raise StructureError(atoms, index, "a position or a cell vector is NaN or infinite")
        for name in ELECTRONS:
            if not _is_number(atoms.info.get(name, 0)):
                raise StructureError(atoms, index, f"its {name} must be a number, got {atoms.info[name]!r}")
    return listed


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
