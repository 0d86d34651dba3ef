"""Predictions for a file of structures. The file may be larger than memory, and an interrupted run resumes."""

import contextlib
import hashlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.io import write
from ase.outputs import all_outputs

from pmlip.atomic_files import naming, read_json, write_json
from pmlip.calculator import novelty_of, one_pass, uncertainties
from pmlip.limits import check_seed
from pmlip.locks import locked_file
from pmlip.methods.base import Method
from pmlip.novelty import Novelty
from pmlip.structures.annotations import annotated, has_uncertainties, without_uncertainties
from pmlip.structures.atoms import StructureError, as_structures
from pmlip.structures.files import check_file, iterate, npz_shapes
from pmlip.unfamiliar import Watch

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
    resumes it, if the finished part of the source has not changed. progress(done, total) counts structures; total is
    None if it is unknown.
    """
    source, out = Path(source), Path(out)
    check_file(source)
    count = model.prediction_samples(samples)
    check_seed(seed)
    if out.suffix not in (".extxyz", ".xyz"):
        raise ValueError(f"predictions are written as extxyz, so out must end in .extxyz or .xyz, got out={out.name!r}")
    partial, notes = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial.json")
    if source.resolve() in (partial.resolve(), notes.resolve()):
        raise ValueError(f"{source} is where unfinished predictions for {out.name} are kept; pass another out=...")
    asked: dict[str, Any] = {"model": identity, "source": source.name, "samples": count, "seed": seed}
    with locked_file(out):
        if out.exists():
            raise ValueError(f"{out} exists already; remove it, or pass another file as out=...")
        done, digest, structures = _resume(partial, notes, asked, source)
        total, watch = count_structures(source), Watch(model, numbered=True)
        while batch := list(itertools.islice(structures, BATCH)):
            try:
                structures_of_batch = as_structures(batch)
                novelty = model.novelty(structures_of_batch) if model.training_features else None
                watch.look(batch, novelty, first=done)
                found = _predict(model, structures_of_batch, count, seed, novelty)
            except StructureError as error:
                raise ValueError(f"{source}: {error.after(done)}") from error
            if not notes.exists():  # not before, so that a run that fails at once leaves no files
                write_json(notes, asked | {"structures": 0, "hash": digest.hexdigest()})
            predicted = _text(annotated(_with_references(atoms), own) for atoms, own in zip(batch, found, strict=True))
            with naming(partial), partial.open("ab") as file:
                file.write(predicted)
                file.flush()
                os.fsync(file.fileno())
            done += len(batch)
            _add(digest, batch, predicted)
            write_json(notes, asked | {"structures": done, "hash": digest.hexdigest()})
            if progress:
                progress(done, total)
        if not done:
            raise ValueError(f"{source} holds no structures")
        partial.replace(out)
        notes.unlink()
    return done


def _predict(
    model: Method, structures: list[Atoms], samples: int, seed: int, novelty: Novelty | None
) -> list[dict[str, Any]]:
    """Predictions and uncertainties of each structure, by name."""
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


def _resume(
    partial: Path, notes: Path, asked: dict[str, Any], source: Path
) -> tuple[int, "hashlib._Hash", Iterator[Atoms]]:
    """Number of finished structures, their hash and the other structures of `source`; removes an incomplete last batch.

    Whole batches are needed because noise drawn per batch row depends on the batch. Raises ValueError if a finished
    structure has changed in `source`.
    """
    digest, structures = hashlib.sha256(), iterate(source)
    if not notes.exists() or not partial.exists():
        partial.unlink(missing_ok=True)
        notes.unlink(missing_ok=True)
        return 0, digest, structures
    try:
        found = read_json(notes)
    except ValueError as error:
        raise ValueError(f"{error}; remove it to start again") from error
    if changed := ", ".join(name for name in asked if found.get(name) != asked[name]):
        raise ValueError(f"{partial} belongs to a run with another {changed}; remove {notes} to start again")
    if "hash" not in found:
        raise ValueError(f"{partial} is from an older pmlip and cannot be resumed; remove {notes} to start again")
    # a killed run may have written structures that it had not noted yet, and never fewer than it had noted
    ends = [0, *itertools.islice(_frame_ends(partial), found["structures"])]
    kept, done = digest, 0
    with partial.open("rb") as file:
        for first in range(0, len(ends) - 1, BATCH):
            last = min(first + BATCH, len(ends) - 1)
            batch = list(itertools.islice(structures, last - first))
            _add(digest, batch, file.read(ends[last] - ends[first]))
            if len(batch) == BATCH:
                kept, done = digest.copy(), last
            else:  # the last batch, which is predicted again
                structures = itertools.chain(batch, structures)
    if digest.hexdigest() != found["hash"]:
        raise ValueError(
            f"a finished structure of {partial} is damaged, or differs from the structure at its position in {source}; "
            f"remove {partial} to start again"
        )
    os.truncate(partial, ends[done])
    return done, kept, structures


def _add(digest: "hashlib._Hash", structures: Iterable[Atoms], predicted: bytes) -> None:
    """Add everything that a prediction keeps of the structures, and the predictions."""
    digest.update(_text(map(_with_references, structures)))
    digest.update(predicted)


def _text(structures: Iterable[Atoms]) -> bytes:
    text = io.StringIO()
    for atoms in structures:
        write(text, atoms, format="extxyz")
    return text.getvalue().encode()


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
