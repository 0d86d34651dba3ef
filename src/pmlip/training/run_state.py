"""The saved state of a fine-tuning run, from which an interrupted run resumes."""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pmlip.atomic_files import atomic_write
from pmlip.checkpoint import DAMAGES, RUN_FORMAT
from pmlip.errors import CheckpointError
from pmlip.plain_values import check_type
from pmlip.tensor_files import check_sum, read_tensors, write_tensors

VERSION = 6  # increase it when the content of a state or the fields of the settings change
STATE_FILE = "last.pt"
ENTRIES: Mapping[str, Any] = {
    "identity": Mapping[str, Any],
    "offsets": Mapping[int, float],
    "scales": Mapping[str, float],
    "noise_rate": float,
    "step": int,
    "seconds": float,
    "best": float,
    "worse": int,
    "log": Sequence[Mapping[str, float]],
    "best_state": Mapping[str, Tensor],
    "model": Mapping[str, Tensor],
    "averaged": Mapping[str, Tensor],
    "optimizer": Mapping[str, Any],
}


def folder_of_part(folder: Path, number: int, *, parts: int) -> Path:
    """Folder for the state of one part of a model; `folder` itself if the model has one part."""
    return folder / f"part-{number}" if parts > 1 else folder


def refuse_state_of_another_kind(folder: Path, *, parts: int) -> None:
    """Raise ValueError if the folder holds a run of a model with one part and this model has several, or vice versa.

    The two kinds keep their states in different files, so `read_state` would not notice.
    """
    other = folder_of_part(folder, 0, parts=1 if parts > 1 else 2) / STATE_FILE
    if other.exists():
        raise ValueError(
            f"{other} belongs to a run with another method; use another folder (folder=...), or remove the file to "
            "start again"
        )


def write_state(file: Path, state: Mapping[str, Any]) -> None:
    """Write the state, and the training log as JSON lines in the same folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(file, {"format": RUN_FORMAT, "version": VERSION, **state})
    with atomic_write(file.with_name("log.jsonl")) as opened:
        opened.writelines(json.dumps(line).encode() + b"\n" for line in state["log"])


def read_state(file: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The saved state of the run; None without a state file. Raises ValueError if the state is from another run."""
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = read_tensors(file)
        version = state["version"]
        if version == VERSION:
            check_sum(file, state, required=True)
            for name, kind in ENTRIES.items():
                check_type(state[name], kind, name)
    except (CheckpointError, *DAMAGES):
        raise ValueError(f"{file} is damaged; remove it to start again") from None
    if version != VERSION:
        raise ValueError(
            f"{file} was written by another version of pmlip and can be resumed only there; remove it to start again"
        )
    for name, value in identity.items():
        stored = state["identity"].get(name)
        if stored != value:
            names = {"model": "another model or other initial weights", "config": "other settings"}
            names |= {"train": "other training data", "valid": "other validation data"}
            if name == "config" and isinstance(stored, Mapping):
                names[name] += f" ({_differences(stored, value)})"
            resume = "to resume it, start from a model with the same initial weights; or " if name == "model" else ""
            raise ValueError(
                f"{file} belongs to a run with {names[name]}; {resume}use another folder (folder=...), or remove the "
                "file to start again"
            )
    return state


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The settings that differ: "steps = 36, now 40"."""
    names = [name for name in wanted if stored.get(name) != wanted[name]]
    return ", ".join(f"{name} = {stored.get(name)!r}, now {wanted[name]!r}" for name in names)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of the block, so that a saved state never holds half a step."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
