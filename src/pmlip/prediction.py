"""Predictions for a file of structures, written as they come: the file may be larger than memory, and a run resumes."""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.io import read, write
from ase.outputs import all_outputs

from pmlip.atomic_files import write_json
from pmlip.calculator import uncertainties
from pmlip.methods.base import Method
from pmlip.structures.annotations import annotated, has_uncertainties, without_uncertainties
from pmlip.structures.atoms import StructureError, as_structures
from pmlip.structures.files import check_file, iterate

BATCH = 64  # structures between two writes


def predict_file(
    model: Method,
    source: str | Path,
    out: str | Path,
    *,
    samples: int = 16,
    seed: int = 0,
    identity: str = "",
    progress: Callable[[int, int | None], None] | None = None,
) -> int:
    """Write every structure of `source` to the extxyz file `out`, with mean and uncertainties; gives their number.

    Results that the structures carry stay with them as REF_energy, REF_forces and so on. Until it is complete, the
    work is in `out` with ".partial" behind its name; called again with the same model (`identity`), source and
    settings it goes on from there. progress(done, all) is told the number of structures; `all` may not be known.
    """
    source, out = Path(source), Path(out)
    check_file(source)
    count = model.spread_samples(samples)
    if out.suffix not in (".extxyz", ".xyz"):
        raise ValueError(f"predictions are written as extxyz, so to a file that ends in .extxyz, not to {out.name!r}")
    if out.exists():
        raise ValueError(f"{out} exists already; remove it, or give another name")
    partial, notes = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial.json")
    asked: dict[str, Any] = {"model": identity, "source": source.name, "samples": count, "seed": seed}
    done = _resume(partial, notes, asked)
    total = count_structures(source)
    structures = iterate(source)
    if done:
        _check_same(next(itertools.islice(structures, done - 1, done), None), partial, source)
    conformal = model.calibration.conformal_for(count) if model.calibration else None
    while batch := list(itertools.islice(structures, BATCH)):
        try:
            drawn, mean = model.sample_with_mean(as_structures(batch), samples=count, seed=seed)
        except StructureError as error:
            raise ValueError(f"{source}: {error.after(done)}") from error
        found = uncertainties(drawn, conformal=conformal)
        with partial.open("a") as file:
            for index, (atoms, own) in enumerate(zip(batch, found, strict=True)):
                own |= {"energy": float(mean.energy[index]), "forces": mean.forces[drawn.system == index].numpy()}
                if "stress_uncertainty" in own:
                    own["stress"] = mean.stress[index].double().numpy()
                write(file, annotated(_with_references(atoms), own), format="extxyz")
            file.flush()
            os.fsync(file.fileno())
        done += len(batch)
        if progress:
            progress(done, total)
    if not done:
        raise ValueError(f"{source} holds no structures")
    partial.replace(out)
    notes.unlink()
    return done


def _resume(partial: Path, notes: Path, asked: dict[str, Any]) -> int:
    """How many structures are there already, in whole batches: where noise belongs to rows, it depends on its batch."""
    if not notes.exists() or not partial.exists():
        partial.unlink(missing_ok=True)
        write_json(notes, asked)
        return 0
    if (found := json.loads(notes.read_text())) != asked:
        changed = ", ".join(name for name in asked if found.get(name) != asked[name])
        raise ValueError(f"{partial} was begun with another {changed}; remove {notes} to start anew")
    ends = [0, *_frame_ends(partial)][::BATCH]
    os.truncate(partial, ends[-1])
    return (len(ends) - 1) * BATCH


def _check_same(expected: Atoms | None, partial: Path, source: Path) -> None:
    """Refuse to go on with a source that is not the one the last finished structure came from."""
    last = read(partial, index=-1, format="extxyz")
    if (
        expected is None
        or len(last) != len(expected)
        or (last.numbers != expected.numbers).any()
        or not np.allclose(last.positions, expected.positions, atol=1e-6)
    ):
        raise ValueError(
            f"{partial} does not end with the structure that {source} has in that place; remove it to start anew"
        )


def count_structures(path: Path) -> int | None:
    """How many structures a file holds, where that is quick to tell."""
    if path.suffix in (".extxyz", ".xyz"):
        return sum(1 for _ in _frame_ends(path))
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return len(arrays["positions"]) if "positions" in arrays else None
    return None


def _frame_ends(path: Path) -> Iterator[int]:
    """Where each complete frame of an (ext)xyz file ends, in bytes."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        place = 0
        while first := file.readline():
            if not first.strip().isdigit():
                return
            lines = [first, *itertools.islice(file, int(first) + 1)]
            if len(lines) < int(first) + 2 or not lines[-1].endswith(b"\n"):
                return
            place += sum(map(len, lines))
            yield place


def _with_references(atoms: Atoms) -> Atoms:
    """A copy whose results are called REF_energy and so on, so that predictions can take their names.

    What is called so already stays: then the results are those of another potential. Where there are uncertainties
    they may be, and are called previous_energy and so on; the uncertainties go.
    """
    results = dict(atoms.calc.results) if atoms.calc is not None else {}
    predicted = has_uncertainties(atoms)
    renamed = without_uncertainties(atoms)
    # extxyz has a line for all of info, and its writer does not escape what ends a line
    renamed.info = {k: " ".join(v.splitlines()) if isinstance(v, str) else v for k, v in renamed.info.items()}
    for name, value in results.items():
        shape = all_outputs[name].shapespec if name in all_outputs else ()
        if len(shape) < 3:  # extxyz has no place for more
            place = renamed.arrays if "natoms" in shape else renamed.info
            place.setdefault(f"{'previous' if predicted else 'REF'}_{name}", value)
    return renamed
