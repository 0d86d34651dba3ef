"""What several commands check before they begin."""

from pathlib import Path

import numpy as np
import torch
from ase import Atoms

from pmlip.structures.labels import fingerprint


def chosen_device(given: str | None) -> str:
    """The device that was asked for, if it is there; otherwise a GPU where there is one."""
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=given)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {given!r} here: {str(error).splitlines()[0]}") from error
    return given


def check_folder(path: Path) -> None:
    """Find out now whether a file can be written there."""
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")


def check_new_file(path: Path) -> None:
    check_folder(path)
    if path.exists():
        raise ValueError(f"{path} exists already; remove it, or give another name")


def name_of_structure(atoms: Atoms) -> str:
    """What a run calls a structure it has seen: without labels, or --exclude would miss it when others are read."""
    return fingerprint([atoms])[:16]


def chosen(available: int, count: int | None, seed: int, path: Path) -> list[int]:
    if count is None:
        return list(range(available))
    if count > available:
        raise ValueError(f"{count} structures were asked for, but {path} holds {available} to choose from")
    return sorted(np.random.default_rng([seed, 3]).permutation(available)[:count].tolist())
