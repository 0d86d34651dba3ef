"""The state of a fine-tuning in its file, from which an interrupted run goes on."""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pmlip.atomic_files import atomic_write
from pmlip.checkpoint import RUN_FORMAT

VERSION = 5  # of what a state holds, and of the settings there are


STATE_FILE = "last.pt"


def folder_of_part(folder: Path, number: int, *, parts: int) -> Path:
    """Where the state of one part of a model lives; a model of one part has the folder for itself."""
    return folder / f"part-{number}" if parts > 1 else folder


def refuse_state_of_another_kind(folder: Path, *, parts: int) -> None:
    """A model of one part and one of several keep their states in different files, so neither would see the other's."""
    other = folder_of_part(folder, 0, parts=1 if parts > 1 else 2) / STATE_FILE
    if other.exists():
        raise ValueError(
            f"{other} belongs to a run with another method; use another folder (folder=...), or remove the file to "
            "start again"
        )


def write_state(file: Path, state: Mapping[str, Any]) -> None:
    """Write the state, and beside it the run's log as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as opened:
        torch.save({"format": RUN_FORMAT, "version": VERSION, **state}, opened)
    with atomic_write(file.with_name("log.jsonl")) as opened:
        opened.writelines(json.dumps(line).encode() + b"\n" for line in state["log"])


def read_state(file: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the run that was stopped here; None if there was none. Refuses that of another run."""
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different type for every way a file can be broken
        raise ValueError(f"{file} is damaged; remove it to start anew") from error
    if state["version"] != VERSION:
        raise ValueError(
            f"{file} was written by another version of pmlip, which alone can go on with it; remove it to start anew"
        )
    for name, value in identity.items():
        if state["identity"].get(name) != value:
            names = {"model": "another model", "config": "other settings"}
            names |= {"train": "other training data", "valid": "other validation data"}
            raise ValueError(
                f"{file} belongs to a run with {names[name]}; use another folder (folder=...), or remove the file to "
                "start again"
            )
    return state


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """An interruption takes effect at the end of the block: half a step would be a state no run has."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
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
