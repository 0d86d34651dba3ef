"""Read structures with DFT labels from extxyz, ase.db, npz and all other formats of ASE.

Labels are found under their common names, such as REF_energy or dft_forces. A damaged file is a ValueError, and a
compressed file must not expand to more than `MOST_EXPANSION` times its size, or 256 MB if that is more.
"""

import contextlib
import io
import math
import re
import sqlite3
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ase.db
import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import iread
from ase.io.formats import UnknownFileTypeError, filetype, open_with_compression
from ase.stress import full_3x3_to_voigt_6_stress

from pmlip.errors import did_you_mean, first_reason
from pmlip.structures import LABELS
from pmlip.structures.annotations import has_uncertainties, places
from pmlip.structures.atoms import StructureError, as_structures
from pmlip.structures.labels import labels

# Common names of each label in lower case, in order of preference. Reference names come before plain names, because a
# plain name may hold the prediction of another potential.
NAMES: Mapping[str, tuple[str, ...]] = {
    "energy": ("ref_energy", "dft_energy", "energy_ref", "energy_dft", "energy", "free_energy", "total_energy"),
    "forces": ("ref_forces", "dft_forces", "forces_ref", "forces_dft", "forces", "force"),
    "stress": ("ref_stress", "dft_stress", "stress_ref", "stress_dft", "stress"),
    "virial": ("ref_virial", "ref_virials", "dft_virial", "dft_virials", "virial", "virials"),
}
NPZ_NAMES = {  # other names of arrays in npz files, the second line of rMD17
    **{"energies": "energy", "cells": "cell", "stresses": "stress", "atomic_numbers": "numbers"},
    **{"coords": "positions", "nuclear_charges": "numbers"},
}
SGDML_NAMES = {"R": "positions", "z": "numbers", "E": "energy", "F": "forces"}
REFERENCES = {name for names in NAMES.values() for name in names if "ref" in name or "dft" in name}
LOOKS_LIKE_A_LABEL = re.compile("energy|force|stress|virial", re.IGNORECASE)

MOST_EXPANSION = 100  # text of structures expands 3 to 10 times; a file that is made to fill the memory, 1000 times
ALWAYS_ALLOWED = 256 * 2**20  # bytes
COMPRESSED = (".gz", ".bz2", ".xz")
LONGEST_REASON = 300  # characters; some readers quote the content of the file
MANY_COLUMNS = re.compile(r":\s*[SRIL]\s*:[\s+0_]*[1-9][\d_]{4}")  # such as pos:R:10000
QUOTED = re.compile(r'"[^"]*"')
NAMES_OF_VALUES = re.compile(r"([^\s=\"]+)\s*=")
PROPERTIES = re.compile(r"Properties=([^\s\"]+)")
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Found:
    """Summary of a file of structures."""

    path: Path
    structures: int
    elements: dict[str, int]  # symbol -> atoms
    atoms: tuple[int, int]  # number in the smallest and in the largest structure
    labels: dict[str, tuple[str, int]]  # label -> its name in the file, number of structures that carry it
    names: list[str]  # all names in the file that could be labels
    unused: tuple[str, ...] = ()  # those that look like labels and are not used

    def require(self, label: str) -> None:
        """Raise a ValueError unless at least one structure carries the label."""
        if label not in self.labels:
            raise ValueError(
                f"{self.path}: none of the structures carries {label}; names in the file: {', '.join(self.names)}. "
                f"If one of these holds the {label}, pass its name as {label}_key=...; to train without {label}, pass "
                f"{label}=0"
            )

    def __str__(self) -> str:
        small, large = self.atoms
        sizes = f"{small}" if small == large else f"{small} to {large}"
        named = [f"{label} ({name!r}, {count} of {self.structures})" for label, (name, count) in self.labels.items()]
        elements = ", ".join(self.elements)
        unused = f"; not used: {', '.join(map(repr, self.unused))}" if self.unused else ""
        return (
            f"{self.path}: {self.structures} structures of {sizes} atoms ({elements}); "
            f"labels: {', '.join(named)}{unused}"
        )


def read_structures(
    path: str | Path,
    *,
    energy_key: str | None = None,
    forces_key: str | None = None,
    stress_key: str | None = None,
) -> tuple[list[Atoms], Found]:
    """Read the structures of a file and return them with a summary; labels are attached as a calculator.

    Without a key, a label is searched under the names in `NAMES`, without regard to case. A label with "virial" in its
    name is converted to a stress, -virial / volume. Errors name the file and the structure.
    """
    path = Path(path)
    structures = list(iterate(path))
    try:
        if not structures:
            raise ValueError("it holds no structures")
        given = {"energy": energy_key, "forces": forces_key, "stress": stress_key}
        names = {label: _name(label, key, structures) for label, key in given.items()}
        for label, key in given.items():
            if key is None:
                _refuse_second_name(label, names[label], structures)
        names = _without_predictions(names, given, structures)
        counts: Counter[str] = Counter()
        labelled = []
        for index, atoms in enumerate(structures):
            values = _values(atoms, index, names)
            counts.update(values.keys())
            labelled.append(_with_labels(atoms, values))
        labels(as_structures(labelled))  # raises an error for NaN, infinite values and wrong shapes
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not counts:
        raise ValueError(
            f"{path}: no energies, forces or stresses were found; names in the file: "
            f"{', '.join(_available(structures)) or 'none'}. Pass the names of the labels as energy_key=..., "
            "forces_key=..., stress_key=..."
        )
    elements = Counter(symbol for atoms in structures for symbol in atoms.symbols)
    sizes = [len(atoms) for atoms in structures]
    found = {label: (str(names[label]), counts[label]) for label in names if counts[label]}
    available = _available(structures)
    used = {name for name, _ in found.values()}
    unused = tuple(name for name in available if name not in used and _looks_like_a_label(name))
    return labelled, Found(path, len(structures), dict(elements), (min(sizes), max(sizes)), found, available, unused)


def iterate(path: str | Path) -> Iterator[Atoms]:
    """Yield the structures of a file one by one, unchanged; only an npz file must fit into memory."""
    path = Path(path)
    check_file(path)
    try:
        if path.suffix == ".npz":
            yield from _read_npz(path)
        elif path.suffix == ".db":
            yield from _read_db(path)
        else:
            _check_content(path)
            kind = filetype(str(path))
            yield from (
                _read_extxyz(path)
                if kind == "extxyz"
                else iread(
                    path,
                    index=":",
                    format=kind,
                    do_not_split_by_at_sign=True,  # "@" is part of the name
                )
            )
    except (UnknownFileTypeError, StopIteration) as error:
        allowed = "allowed: extxyz, ase.db, npz and the other formats that ASE reads"
        raise ValueError(f"{path}: ASE does not recognise its format; {allowed}") from error
    except Exception as error:  # ASE raises a different type for every way a file can be broken
        raise ValueError(f"{path}: it cannot be read: {first_reason(error)[:LONGEST_REASON]}") from error


def check_file(path: Path) -> None:
    """Raise an error if the file is missing or empty."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")


def _check_content(path: Path) -> None:
    """Raise a ValueError if a file begins with a byte order mark, is compressed and damaged, or expands too much."""
    with contextlib.closing(open_with_compression(str(path), "rb")) as file:
        if file.read(3).startswith(BYTE_ORDER_MARKS):
            raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
        size = 3
        while path.suffix in COMPRESSED and (part := file.read(2**20)):
            size += len(part)
            _check_size(path, size)


def _check_size(path: Path, expanded: int) -> None:
    allowed = max(ALWAYS_ALLOWED, MOST_EXPANSION * path.stat().st_size)
    if expanded > allowed:
        raise ValueError(
            f"it expands to more than {allowed // 10**6} MB, {MOST_EXPANSION} times its size; if it is not a mistake, "
            "decompress it first"
        )


class _Text(io.TextIOWrapper):
    """An extxyz file that raises an error where ASE would run without end.

    ASE reads as many lines as a frame says it has atoms, also after the end of the file, and makes a list with an entry
    for each column that the comment line announces.
    """

    _read_at_end = 0

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # the stub allows None too
        line = super().readline(size)
        self._read_at_end = 0 if line else self._read_at_end + 1
        if self._read_at_end > 5:
            raise EOFError("the last frame has fewer atoms than its first line says")
        if "Properties" in line and MANY_COLUMNS.search(line):
            raise ValueError("the Properties of a frame name an array with 10000 columns or more")
        if "Properties=" in line and (twice := _repeated(line)):
            raise ValueError(f"a frame names {twice!r} twice; rename or remove one of them")
        return line


def _repeated(comment: str) -> str | None:
    """The first name that a comment line of extxyz gives twice, of which ASE would keep the last."""
    names = NAMES_OF_VALUES.findall(QUOTED.sub('""', comment))
    columns = PROPERTIES.search(comment)
    names += columns.group(1).split(":")[::3] if columns else []
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _read_extxyz(path: Path) -> Iterator[Atoms]:
    with _Text(open_with_compression(str(path), "rb"), encoding="utf-8") as file:
        yield from iread(file, index=":", format="extxyz")


def _read_db(path: Path) -> Iterator[Atoms]:
    # ASE would add its tables to a database that has none
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'systems'").fetchone():
            raise ValueError("it is a database, but not one of ASE")
    with ase.db.connect(path) as database:
        for row in database.select():
            yield row.toatoms(add_additional_information=True)


def npz_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of the arrays in an npz file, which are not read.

    Raises a ValueError if an array has another size than its header says, or needs code to be read.
    """
    shapes = {}
    with zipfile.ZipFile(path) as archive:
        _check_size(path, sum(entry.file_size for entry in archive.infolist()))
        for name, entry in _arrays(archive).items():
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                if version not in _NPY_HEADERS:
                    raise ValueError(f"its array {name!r} has the unknown format {version[0]}.{version[1]}")
                shape, _, dtype = _NPY_HEADERS[version](file)
                size = entry.file_size - file.tell()
            if dtype.hasobject:
                raise ValueError(f"its array {name!r} holds Python objects; store numbers or strings")
            if math.prod(shape) * dtype.itemsize != size:
                raise ValueError(f"its array {name!r} has {size} bytes, too few or too many for shape {shape}")
            shapes[name] = shape
    return shapes


_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def _arrays(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
    return {entry.filename.removesuffix(".npy"): entry for entry in entries}


def _read_npz(path: Path) -> Iterator[Atoms]:
    """Yield structures of one composition from positions (structure, atom, 3), symbols or numbers, cells and labels."""
    npz_shapes(path)
    content = {}
    with zipfile.ZipFile(path) as archive:  # not np.load, which advises to load some damaged files unsafely
        for name, entry in _arrays(archive).items():
            with archive.open(entry) as file:
                content[name] = np.lib.format.read_array(file, allow_pickle=False)
    names = NPZ_NAMES | (SGDML_NAMES if {"R", "z"} <= content.keys() else {})
    content = {names.get(name, name): value for name, value in content.items()}
    if "positions" not in content or not {"symbols", "numbers"} & content.keys():
        raise ValueError(
            "an npz file must hold positions (structure, atom, 3) and symbols or numbers (atom,), and may hold cells, "
            "energies, forces and stresses, or the same under the names of sGDML and rMD17; it holds "
            f"{', '.join(content)}"
        )
    kinds = content["symbols"].tolist() if "symbols" in content else content["numbers"]
    count, form = len(content["positions"]), content["positions"].shape[1:]
    if "cell" in content and content["cell"].shape == (3, 3):  # one cell for all structures
        content["cell"] = np.broadcast_to(content["cell"], (count, 3, 3))
    if "energy" in content and content["energy"].shape == (count, 1):
        content["energy"] = content["energy"][:, 0]
    for name in ("cell", *LABELS):
        if name in content and content[name].shape[:1] != (count,):
            raise ValueError(f"{name} has shape {content[name].shape}, but positions holds {count} structures")
    known = {"positions", "cell", "symbols", "numbers", *LABELS}
    others = {name: value for name, value in content.items() if name not in known and value.shape[:1] == (count,)}
    for index, positions in enumerate(content["positions"]):
        cell = content["cell"][index] if "cell" in content else None
        atoms = Atoms(kinds, positions, cell=cell, pbc=cell is not None)
        for name, values in others.items():  # may include labels under other names
            if values.shape[1:] == form:
                atoms.set_array(name, values[index])
            else:
                atoms.info[name] = values[index]
        yield _with_labels(atoms, {name: content[name][index] for name in LABELS if name in content})


def _name(label: str, key: str | None, structures: Sequence[Atoms]) -> str | None:
    """Return the name under which the structures carry a label, or None."""
    available = _available(structures)
    if key is not None:
        if key in available:
            return key
        hint = did_you_mean(key, available)
        raise ValueError(
            f"{label}_key={key!r} is not in the file; names in the file: {', '.join(available) or 'none'}{hint}"
        )
    return next(_matching(label, available), None)


def _looks_like_a_label(name: str) -> bool:
    """Whether a name in a file may be a label; ASE repeats energies as free energies, and pmlip adds uncertainties."""
    known = name in ("free_energy", "energies", "stresses") or name.endswith("uncertainty")
    return bool(LOOKS_LIKE_A_LABEL.search(name)) and not known


def _matching(label: str, available: Sequence[str]) -> Iterator[str]:
    """Yield the available names that are common for a label, the best first."""
    for common in NAMES[label] + (NAMES["virial"] if label == "stress" else ()):
        yield from (name for name in available if name.lower() == common)


def _refuse_second_name(label: str, name: str | None, structures: Sequence[Atoms]) -> None:
    """Raise an error if a structure carries the label under another name only, so that no label is silently ignored.

    Files that were concatenated from several sources have this problem.
    """
    for index, atoms in enumerate(structures):
        own = _available([atoms])
        other = None if name in own else next(_matching(label, own), None)
        if other:
            raise StructureError(
                atoms,
                index,
                f"its {label} is named {other!r}, but in other structures {name!r}; use one name for all, or choose "
                f"one with {label}_key=...",
            )


def _without_predictions(
    names: Mapping[str, str | None], given: Mapping[str, str | None], structures: Sequence[Atoms]
) -> dict[str, str | None]:
    """Drop labels that are probably predictions: a plain name, not given as a key, in a file with uncertainties.

    Raises an error if no label remains.
    """
    with_uncertainties = [index for index, atoms in enumerate(structures) if has_uncertainties(atoms)]
    found = [label for label, name in names.items() if name]
    plain = [label for label in found if given[label] is None and str(names[label]).lower() not in REFERENCES]
    if not with_uncertainties or not plain:
        return dict(names)
    if plain == found:
        index, label = with_uncertainties[0], plain[0]
        raise StructureError(
            structures[index],
            index,
            f"it carries uncertainties, so its {names[label]!r} is probably a prediction; if it is a label, "
            f"pass {label}_key={names[label]!r}",
        )
    return {label: None if label in plain else name for label, name in names.items()}


def _available(structures: Sequence[Atoms]) -> list[str]:
    """Return all names under which the structures carry a value that could be a label."""
    names: dict[str, None] = {}
    for atoms in structures:
        for place in places(atoms):
            names.update(dict.fromkeys(place))
    return [name for name in names if name not in ("numbers", "positions")]


def _values(atoms: Atoms, index: int, names: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the labels of one structure in ASE's units and sign convention."""
    values = {}
    for label, name in names.items():
        found = next((place[name] for place in places(atoms) if name is not None and name in place), None)
        if found is None:
            continue
        try:
            value = np.asarray(found, dtype=float)
        except (TypeError, ValueError) as error:
            raise StructureError(atoms, index, f"its {name!r} is {found!r}, which is not numeric") from error
        values[label] = _CHECKS[label](value, atoms, index, str(name))
    return values


def _energy(value: np.ndarray, atoms: Atoms, index: int, name: str) -> float:
    if value.size != 1:
        raise StructureError(atoms, index, f"its {name!r} must be one number, got shape {value.shape}")
    return float(value.reshape(()))


def _forces(value: np.ndarray, atoms: Atoms, index: int, name: str) -> np.ndarray:
    if value.shape != (len(atoms), 3):
        raise StructureError(atoms, index, f"its {name!r} must have shape ({len(atoms)}, 3), got {value.shape}")
    return value


def _stress(value: np.ndarray, atoms: Atoms, index: int, name: str) -> np.ndarray:
    if value.size == 9:
        value = full_3x3_to_voigt_6_stress(value.reshape(3, 3))
    if value.shape != (6,):
        raise StructureError(atoms, index, f"its {name!r} must have 6 or 9 numbers, got shape {value.shape}")
    if "virial" in name.lower():
        if atoms.cell.rank < 3:
            raise StructureError(atoms, index, f"its {name!r} cannot be converted to a stress without a full cell")
        value = -value / atoms.cell.volume
    return value


_CHECKS: dict[str, Callable[[np.ndarray, Atoms, int, str], Any]] = {
    "energy": _energy,
    "forces": _forces,
    "stress": _stress,
}


def _with_labels(atoms: Atoms, values: Mapping[str, Any]) -> Atoms:
    labelled = atoms.copy()
    labelled.calc = SinglePointCalculator(labelled, **values)
    return labelled
