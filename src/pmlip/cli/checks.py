"""Checks of the input that several commands make before they start."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ase import Atoms


def chosen_device(given: str | None) -> str:
    """The given device, if it is available; by default a GPU if there is one."""
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given).item()  # fails on devices that hold no data, such as meta
    except (RuntimeError, AssertionError) as error:
        allowed = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        allowed += ["mps"] if torch.backends.mps.is_available() else []
        raise ValueError(f"device {given!r} is not available on this machine; allowed: {', '.join(allowed)}") from error
    return given


def check_output(path: Path, *, inputs: Iterable[Path | None] = ()) -> None:
    """Raise an error now, before a long run, if a file cannot be written, or would replace an input or a model."""
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; give the name of a file")
    refuse_inputs(path, inputs)
    if path.exists() and _is_archive(path):
        raise ValueError(f"cannot write {path}: it is a model file or another archive; give another name")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; give a file that can be written") from error


def refuse_inputs(path: Path, inputs: Iterable[Path | None]) -> None:
    """Raise ValueError if a file that is to be written is an input, also under another name."""
    for file in inputs:
        if file is not None and file.exists() and path.exists() and path.samefile(file):
            raise ValueError(f"cannot write {path}: it is an input of this command; give another name")


def _is_archive(path: Path) -> bool:
    """Whether a file is a zip archive, as torch writes them; scores and reports never are."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def check_new_file(path: Path) -> None:
    """Raise an error now, before a long run, if a file exists already or cannot be written."""
    if path.exists():
        raise ValueError(f"{path} exists already; remove it, or give another name")
    check_output(path)


def name_of_structure(atoms: "Atoms") -> str:
    """A hash of the structure without its labels, so that --exclude finds it also if other labels are read."""
    from pmlip.structures.labels import fingerprint

    return fingerprint([atoms])[:16]


def chosen(available: int, count: int | None, seed: int, path: Path) -> list[int]:
    """Indices of `count` structures drawn at random from those available; of all by default."""
    import numpy as np

    if count is None:
        return list(range(available))
    if count > available:
        raise ValueError(f"--count {count} is too large: {path} has {available} structures to choose from")
    return sorted(np.random.default_rng([seed, 3]).permutation(available)[:count].tolist())
