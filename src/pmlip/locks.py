"""Locks on outputs: two processes never write the same file or folder.

The kernel releases a lock when its process ends, however it ends, so a lock file that is left behind is harmless.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pmlip.errors import OutputInUseError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def locked_file(path: str | Path) -> Iterator[None]:
    """Hold the lock of an output file inside the block; raises OutputInUseError if another process holds it."""
    place = Path(path).resolve()
    with _locked(place.with_name(f".{place.name}.lock"), path):
        yield


@contextlib.contextmanager
def locked_folder(folder: str | Path) -> Iterator[None]:
    """Hold the lock of an output folder inside the block; raises OutputInUseError if another process holds it.

    Files in the folder have their own locks.
    """
    with _locked(Path(folder).resolve() / ".lock", folder):
        yield


@contextlib.contextmanager
def _locked(file: Path, output: str | Path) -> Iterator[None]:
    """Hold a lock file inside the block. It names this process, for the message of another one.

    Missing folders are created, and removed again if nothing was written to them.
    """
    created = [folder for folder in file.parents if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = take(file)
        if opened is not None:
            held_by = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
            os.write(opened.fileno(), json.dumps(held_by).encode())
    except OSError as error:
        raise ValueError(f"cannot write {output}: {error.strerror}; give an output that can be written") from error
    if opened is None:
        raise OutputInUseError(
            f"{output} is being written by {_holder(file)}; wait until it ends, stop it, or give another output"
        )
    with opened:
        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # while it is locked, so that no other process has it
            with contextlib.suppress(OSError):  # not empty
                for folder in created:
                    folder.rmdir()


def take(file: Path, *, wait: bool = False) -> IO[bytes] | None:
    """Open an empty file that this process alone holds until it is closed; None if another process holds it.

    wait: wait for the other process. File systems without locks give the file to every process.
    """
    while True:
        opened = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "wb")
        if _lock(opened, wait=wait) is False:
            opened.close()
            return None
        if _is_at(opened, file):
            opened.truncate()
            return opened
        opened.close()  # the last holder removed it after it was opened here


def remove_if_free(file: Path) -> None:
    """Remove a file unless a process holds it, if that can be known and this process may remove it."""
    with contextlib.suppress(OSError), file.open("rb+") as opened:
        if _lock(opened) and _is_at(opened, file):
            file.unlink()


def _lock(opened: IO[bytes], *, wait: bool = False) -> bool | None:
    """Whether this process holds the file now; None on file systems without locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(opened: IO[bytes], file: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(opened.fileno()), file.stat())
    except FileNotFoundError:
        return False


def _holder(file: Path) -> str:
    """The process that holds a lock file, in words."""
    try:
        found = json.loads(file.read_text())
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, LookupError, TypeError):  # it has not written it yet
        return "another process"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
