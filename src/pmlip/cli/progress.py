"""The bar that long work shows: what, how much of it, how long, how much longer."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

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
    """Say of work that is kept in files that an interruption costs nothing."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopped, and nothing is lost: the same command goes on from here")
        raise


def counter(bar: Progress, what: str, total: int | None = None) -> Callable[[int, int | None], None]:
    """A new line of the bar, and the function (done, all) that moves it."""
    return partial(_move, bar, bar.add_task(what, total=total))


def _move(bar: Progress, task: TaskID, done: int, total: int | None) -> None:
    bar.update(task, completed=done, total=total)
