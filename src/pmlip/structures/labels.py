"""Labels of structures as tensors."""

import hashlib
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from ase import Atoms
from ase.stress import full_3x3_to_voigt_6_stress

from pmlip.samples import PER_ATOM, Outputs
from pmlip.structures import LABELS
from pmlip.structures.atoms import StructureError, as_structures, electrons, system_index


def labels(structures: Atoms | Iterable[Atoms]) -> Outputs:
    """Return energy (system,), forces (atom, 3) and stress (system, 6) of the structures, in double precision.

    They are read from the calculator results of each structure, where ASE's readers store them. A missing label is NaN;
    a label whose value is NaN or infinite raises an error.
    """
    listed = as_structures(structures)
    energy = np.full(len(listed), np.nan)
    stress = np.full((len(listed), 6), np.nan)
    forces = []
    for index, atoms in enumerate(listed):
        results = atoms.calc.results if atoms.calc is not None else {}
        if results and atoms.calc.check_state(atoms):
            raise StructureError(
                atoms,
                index,
                "the results of its calculator belong to other positions or to another structure; compute them again, "
                "or attach a SinglePointCalculator to each structure",
            )
        for name, value in results.items():
            if name in LABELS and not np.isfinite(value).all():
                raise StructureError(atoms, index, f"its label {name!r} is NaN or infinite")
        energy[index] = results.get("energy", np.nan)
        if "stress" in results and atoms.cell.rank == 3:  # a stress needs a cell
            given = np.asarray(results["stress"], dtype=float)
            stress[index] = full_3x3_to_voigt_6_stress(given) if given.shape == (3, 3) else given
        given = np.asarray(results.get("forces", np.full((len(atoms), 3), np.nan)), dtype=float)
        if given.shape != (len(atoms), 3):
            raise StructureError(atoms, index, f"forces must have shape ({len(atoms)}, 3), got {given.shape}")
        forces.append(given)
    named = {"energy": energy, "forces": np.concatenate(forces), "stress": stress}
    return Outputs({name: torch.from_numpy(value) for name, value in named.items()}, system_index(listed))


def _can_carry(structures: Sequence[Atoms], name: str) -> torch.Tensor:
    """Return a mask of the structures for which the label is defined: a stress needs a cell."""
    return torch.tensor([name != "stress" or atoms.cell.rank == 3 for atoms in structures])


def check_labels(structures: Sequence[Atoms], found: Outputs, names: Sequence[str], *, missing: bool) -> None:
    """Raise an error if no structure carries forces, or if only some structures carry one of these labels.

    found: the labels of the structures. missing: whether a label may be missing on some structures.
    """
    for name in names:
        possible = _can_carry(structures, name)
        lacking = [index for index in _lacking(found, name).tolist() if possible[index]]
        count = int(possible.sum()) - len(lacking)
        if name == "forces" and count == 0:
            raise ValueError("none of the structures carries forces; to train without forces, pass forces=0")
        if not missing and count and lacking:
            index = lacking[0]
            raise StructureError(
                structures[index],
                index,
                f"it carries no {name}, and {count} of {len(structures)} structures do; remove it, or pass "
                "missing=True to allow missing labels",
            )


def require_labels(structures: Sequence[Atoms], names: Sequence[str]) -> None:
    """Raise an error for the first structure that lacks one of these labels."""
    found = labels(structures)
    for name in names:
        if len(lacking := _lacking(found, name)):
            index = int(lacking[0])
            raise StructureError(
                structures[index],
                index,
                f"it has no {name}; this function needs {name} for every structure. Remove the structure.",
            )


def _lacking(found: Outputs, name: str) -> torch.Tensor:
    """Return the indices of structures whose label is missing or incomplete."""
    entries = found[name].isfinite()
    rows = entries.flatten(1).all(-1) if entries.dim() > 1 else entries
    return (found.system[~rows] if name in PER_ATOM else (~rows).nonzero().flatten()).unique()


def fingerprint(structures: Sequence[Atoms], found: Outputs | None = None) -> str:
    """Return a hash of the structures, and of their labels if given."""
    digest = hashlib.sha256()
    for atoms in structures:
        for array in (atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc):
            digest.update(np.ascontiguousarray(array).tobytes())
        if known := electrons(atoms):
            digest.update(repr(known).encode())
    if found is not None:
        for value in found.values():
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def split(found: Outputs) -> list[Outputs]:
    """Split the labels of a batch into one `Outputs` per structure."""
    sizes = found.atoms_per_system.tolist()
    named: dict[str, Sequence[torch.Tensor]] = {
        name: value.split(sizes) if name in PER_ATOM else value.split(1) for name, value in found.items()
    }
    parts = zip(*named.values(), strict=True)
    zeros = torch.zeros_like(found.system).split(sizes)
    return [Outputs(dict(zip(named, part, strict=True)), own) for part, own in zip(parts, zeros, strict=True)]


def join(parts: Sequence[Outputs]) -> Outputs:
    """Concatenate the labels of several batches."""
    system = torch.cat([part.system + start for part, start in zip(parts, _starts(parts), strict=True)])
    return Outputs({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, system)


def _starts(parts: Sequence[Outputs]) -> list[int]:
    return list(itertools.accumulate((part.systems for part in parts[:-1]), initial=0))
