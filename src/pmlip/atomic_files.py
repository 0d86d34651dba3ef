"""Atomic writes: a file appears under its name only when it is complete. Reading of JSON that may be damaged."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing; an interrupted write leaves the old file unchanged."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: str | Path, content: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def read_json(path: str | Path) -> dict[str, Any]:
    """The mapping in a JSON file; raises ValueError if the file is damaged."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not text, or brackets nested without end
        raise ValueError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(content).__name__} instead of named values")
    return content
