"""Data sets of DFT structures: the silica set that ships with pmlip, and readers for published sets.

"name:file" selects the reader of a published set, for instance "tan_silica:silica_train.xyz"; any other file is read by
`pmlip.read_structures`.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read
from ase.units import kcal, mol

from pmlip.errors import did_you_mean
from pmlip.structures.atoms import in_file
from pmlip.structures.files import read_structures
from pmlip.structures.labels import labels, require_labels

SILICA_PBE_PARTS = ("train", "valid", "test", "hot", "strained", "polymorph", "eos")
UNSEEN_SILICA_PBE = ("hot", "strained", "polymorph")  # out of distribution


def silica_pbe(part: str) -> list[Atoms]:
    """A part of the PBE silica set that ships with pmlip; datasets/silica_pbe describes how it was made.

    train, valid, test: quartz and cristobalite at 300 to 900 K, or with small random displacements and strains up to
    2 %. Out of distribution: hot (1500 to 3000 K), strained (up to 8 %), polymorph (stishovite and coesite).
    eos: perfect quartz at seven volumes, with all lengths changed by -3 to 3 %.
    """
    if part not in SILICA_PBE_PARTS:
        hint = did_you_mean(part, SILICA_PBE_PARTS)
        raise ValueError(f"silica_pbe has no part {part!r}; allowed: {', '.join(SILICA_PBE_PARTS)}{hint}")
    return [copy.deepcopy(atoms) for atoms in _whole_silica_pbe() if atoms.info["part"] == part]


@functools.cache
def _whole_silica_pbe() -> list[Atoms]:
    # cached, because reading takes seconds
    with resources.as_file(resources.files("pmlip") / "data" / "silica_pbe.extxyz.xz") as file:
        return list(read(file, index=":", format="extxyz"))


def tan_silica(path: str | Path, **keys: str | None) -> list[Atoms]:
    """The silica set of Tan et al. (2023), the paper's second benchmark, from its extxyz file in kcal/mol.

    keys: names of the labels, as for `pmlip.read_structures`.
    """
    structures, _ = read_structures(path, **keys)
    _check_silica(structures, path, unit="kcal/mol", per_atom=(-300.0, -100.0))
    return [_scaled(atoms, kcal / mol) for atoms in structures]


def zeo22(path: str | Path, **keys: str | None) -> list[Atoms]:
    """A zeolite of Si-ZEO22 from its npz file: energies, forces, positions, cells, symbols, in eV and Å."""
    structures, _ = read_structures(path, **keys)
    _check_silica(structures, path, unit="eV", per_atom=(-12.0, -4.0))
    return structures


_IN_FILES: Mapping[str, Callable[..., list[Atoms]]] = {"tan_silica": tan_silica, "zeo22": zeo22}


def read_set(given: str, **keys: str | None) -> list[Atoms]:
    """The structures of "file" or "name:file"; keys: names of the labels, as for `pmlip.read_structures`."""
    name, colon, file = given.partition(":")
    if not colon or Path(given).exists():
        return read_structures(given, **keys)[0]
    if name not in _IN_FILES:
        hint = did_you_mean(name, _IN_FILES)
        raise ValueError(f"unknown data set {name!r}; allowed before the colon: {', '.join(_IN_FILES)}{hint}")
    return _IN_FILES[name](file, **keys)


def _check_silica(structures: Sequence[Atoms], path: str | Path, *, unit: str, per_atom: tuple[float, float]) -> None:
    """Raise ValueError unless all structures are silica with energies in `unit`.

    Relative to isolated atoms, silica has -4 to -13 eV per atom, so a wrong unit is detected.
    """
    for index, atoms in enumerate(structures):
        if set(atoms.symbols) != {"Si", "O"}:
            raise ValueError(f"{path}: structure {index} is {atoms.get_chemical_formula()}, not silica")
    with in_file(path):
        require_labels(structures, ("energy", "forces"))
    energy = float(np.median(labels(structures).energy.numpy() / [len(atoms) for atoms in structures]))
    low, high = per_atom
    if not low < energy < high:
        raise ValueError(
            f"{path}: its energies are {energy:.4g} per atom, but in {unit} they would lie between {low:g} and "
            f"{high:g}; check the unit of the file"
        )


def _scaled(atoms: Atoms, unit: float) -> Atoms:
    """A copy of the structure with its labels multiplied by `unit`."""
    results = {name: unit * value for name, value in atoms.calc.results.items()}
    scaled = atoms.copy()
    scaled.calc = SinglePointCalculator(scaled, **results)
    return scaled
