"""The bar that long work shows: what, how much of it, how long, how much longer."""

from collections.abc import Callable
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


def counter(bar: Progress, what: str, total: int | None = None) -> Callable[[int, int | None], None]:
    """A new line of the bar, and the function (done, all) that moves it."""
    return partial(_move, bar, bar.add_task(what, total=total))


def _move(bar: Progress, task: TaskID, done: int, total: int | None) -> None:
    bar.update(task, completed=done, total=total)
