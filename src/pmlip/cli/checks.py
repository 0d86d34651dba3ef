"""Checks of the input that several commands make before they start."""

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


def check_folder(path: Path) -> None:
    """Raise an error now, before a long run, if the folder of a file to be written does not exist."""
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no folder {path.parent}")


def check_new_file(path: Path) -> None:
    check_folder(path)
    if path.exists():
        raise ValueError(f"{path} exists already; remove it, or give another name")


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
