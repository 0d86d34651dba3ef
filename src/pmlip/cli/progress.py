"""The progress bar of long work: current task, fraction done, time spent and time left."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


@contextlib.contextmanager
def resumable(console: Console) -> Iterator[None]:
    """After an interruption, print that the same command continues the work."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopped; progress is saved: run the same command again to continue")
        raise


@contextlib.contextmanager
def printed_warnings(console: Console, file: Path) -> Iterator[None]:
    """Inside the block, warnings are printed as lines that name this file."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(f"warning: {file}: {message}", markup=False)
        yield


def counter(bar: Progress, what: str, total: int | None = None) -> Callable[[int, int | None], None]:
    """The function (done, total) that moves a new line of the bar; the line appears with its first call."""
    return partial(_move, bar, bar.add_task(what, total=total, visible=False))


def _move(bar: Progress, task: TaskID, done: int, total: int | None) -> None:
    bar.update(task, completed=done, total=total, visible=True)
