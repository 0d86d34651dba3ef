"""Predictions for a file of structures. The file may be larger than memory, and an interrupted run resumes."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.io import read, write
from ase.outputs import all_outputs

from pmlip.atomic_files import read_json, write_json
from pmlip.calculator import novelty_of, one_pass, uncertainties
from pmlip.limits import check_seed
from pmlip.methods.base import Method
from pmlip.structures.annotations import annotated, has_uncertainties, without_uncertainties
from pmlip.structures.atoms import StructureError, as_structures
from pmlip.structures.files import check_file, iterate, npz_shapes

BATCH = 64  # structures per write
LONGEST_COUNT = 18  # bytes of the line with the number of atoms


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
    """Write every structure of `source` with its predictions to the extxyz file `out`; returns their number.

    Predictions are the mean over all noise, the uncertainties, and the novelty if the model knows its training set.
    samples=0: one pass, with the prediction without noise and error bars from novelty. Labels in `source` are kept as
    REF_energy, REF_forces and so on.

    Unfinished work is in a file named `out` + ".partial": a call with the same model (`identity`), source and settings
    resumes it. progress(done, total) counts structures; total is None if it is unknown.
    """
    source, out = Path(source), Path(out)
    check_file(source)
    count = model.prediction_samples(samples)
    check_seed(seed)
    if out.suffix not in (".extxyz", ".xyz"):
        raise ValueError(f"predictions are written as extxyz, so out must end in .extxyz or .xyz, got out={out.name!r}")
    if out.exists():
        raise ValueError(f"{out} exists already; remove it, or pass another file as out=...")
    partial, notes = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial.json")
    asked: dict[str, Any] = {"model": identity, "source": source.name, "samples": count, "seed": seed}
    done = _resume(partial, notes, asked)
    total = count_structures(source)
    structures = iterate(source)
    if done:
        _check_same(next(itertools.islice(structures, done - 1, done), None), partial, source)
    while batch := list(itertools.islice(structures, BATCH)):
        try:
            found = _predict(model, as_structures(batch), count, seed)
        except StructureError as error:
            raise ValueError(f"{source}: {error.after(done)}") from error
        if not notes.exists():  # not before, so that a run that fails at once leaves no files
            write_json(notes, asked)
        with partial.open("a") as file:
            for atoms, own in zip(batch, found, strict=True):
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


def _predict(model: Method, structures: list[Atoms], samples: int, seed: int) -> list[dict[str, Any]]:
    """Predictions and uncertainties of each structure, by name."""
    novelty = model.novelty(structures) if model.training_features else None
    if not samples:
        assert novelty is not None
        return one_pass(novelty)
    drawn, mean = model.sample_with_mean(structures, samples=samples, seed=seed)
    calibration = model.calibration
    found = uncertainties(
        drawn,
        conformal=calibration.conformal_for(samples) if calibration else None,
        energy_factor=calibration.energy_factor if calibration else 1.0,
    )
    for index, own in enumerate(found):
        own |= {"energy": float(mean.energy[index]), "forces": mean.forces[drawn.system == index].numpy()}
        if "stress_uncertainty" in own:
            own["stress"] = mean.stress[index].double().numpy()
        own |= novelty_of(novelty)[index] if novelty is not None else {}
    return found


def _resume(partial: Path, notes: Path, asked: dict[str, Any]) -> int:
    """Number of finished structures, after removing an incomplete last batch.

    Whole batches are needed because noise drawn per batch row depends on the batch.
    """
    if not notes.exists() or not partial.exists():
        partial.unlink(missing_ok=True)
        notes.unlink(missing_ok=True)
        return 0
    try:
        found = read_json(notes)
    except ValueError as error:
        raise ValueError(f"{error}; remove it to start again") from error
    if found != asked:
        changed = ", ".join(name for name in asked if found.get(name) != asked[name])
        raise ValueError(f"{partial} belongs to a run with another {changed}; remove {notes} to start again")
    ends = [0, *_frame_ends(partial)][::BATCH]
    os.truncate(partial, ends[-1])
    return (len(ends) - 1) * BATCH


def _check_same(expected: Atoms | None, partial: Path, source: Path) -> None:
    """Raise ValueError unless the last finished structure is `expected`, the structure at its position in `source`."""
    try:
        last = read(partial, index=-1, format="extxyz")
    except Exception as error:  # ASE raises a different type for every way a file can be broken
        raise ValueError(f"{partial} is damaged; remove it to start again") from error
    if (
        expected is None
        or len(last) != len(expected)
        or (last.numbers != expected.numbers).any()
        or not np.allclose(last.positions, expected.positions, atol=1e-6)
    ):
        raise ValueError(
            f"the last structure of {partial} differs from the structure at its position in {source}; remove "
            f"{partial} to start again"
        )


def count_structures(path: Path) -> int | None:
    """Number of structures in a file; None if counting them would be slow."""
    if path.suffix in (".extxyz", ".xyz"):
        return sum(1 for _ in _frame_ends(path))
    if path.suffix == ".npz":
        with contextlib.suppress(Exception):  # `iterate` says how the file is damaged
            return npz_shapes(path)["positions"][0]
    return None


def _frame_ends(path: Path) -> Iterator[int]:
    """Byte offset of the end of each complete frame of an (ext)xyz file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        place = 0
        while (first := file.readline(LONGEST_COUNT)).strip().isdigit() and first.endswith(b"\n"):
            place, lines, last = place + len(first), 0, first
            for last in itertools.islice(file, int(first) + 1):
                place, lines = place + len(last), lines + 1
            if lines <= int(first) or not last.endswith(b"\n"):
                return
            yield place


def _with_references(atoms: Atoms) -> Atoms:
    """A copy whose results are renamed to REF_energy and so on, to free the names for predictions.

    Existing REF_ values are kept, since the results then come from another potential. Results with uncertainties are
    probably predictions; they are renamed to previous_energy and so on, and their uncertainties are removed.
    """
    results = dict(atoms.calc.results) if atoms.calc is not None else {}
    predicted = has_uncertainties(atoms)
    renamed = without_uncertainties(atoms)
    # extxyz stores info in one line, and its writer does not escape line breaks
    renamed.info = {k: " ".join(v.splitlines()) if isinstance(v, str) else v for k, v in renamed.info.items()}
    for name, value in results.items():
        shape = all_outputs[name].shapespec if name in all_outputs else ()
        if len(shape) < 3:  # extxyz cannot store arrays with more axes
            place = renamed.arrays if "natoms" in shape else renamed.info
            place.setdefault(f"{'previous' if predicted else 'REF'}_{name}", value)
    return renamed
