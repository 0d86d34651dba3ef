"""Atomic writes: a file appears under its name only when it is complete. Reading of JSON that may be damaged."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pmlip.locks import remove_if_free, take


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing; an interrupted write leaves the old file unchanged.

    The unfinished file is hidden. If a killed process left one behind, the next write of the same file removes it.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with naming(target):
        _remove_abandoned(target)
        file = take(partial, wait=True)
        assert file is not None
        with file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if os.name == "nt":
                    file.close()  # Windows cannot rename an open file
                partial.replace(target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Errors of the operating system inside the block name this file, which the error of a full disk does not."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else error.__context__  # torch raises its own error after it
        if not isinstance(reason, OSError):
            raise
        hint = "; free some space and run it again" if reason.errno == errno.ENOSPC else ""
        raise type(reason)(f"cannot write {path}: {reason.strerror or reason}{hint}") from error


def _remove_abandoned(target: Path) -> None:
    """Remove the unfinished files of this name whose processes have died."""
    name = re.compile(rf"\.{re.escape(target.name)}\.\d+\.partial")
    with contextlib.suppress(OSError):  # the write that follows raises it again, with the name of the file
        for file in target.parent.iterdir():
            if name.fullmatch(file.name):
                remove_if_free(file)


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
