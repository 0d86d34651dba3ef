"""Runs the cells (method x size x seed) of a benchmark. Each cell has one result file, so a run can be resumed."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pmlip.atomic_files import read_json, write_json
from pmlip.cli.progress import progress_bar
from pmlip.errors import RunFailedError
from pmlip.memory import keep_freed_memory


@dataclass(frozen=True)
class Cell:
    """One entry of a benchmark: a method, a training size and a seed."""

    method: str
    size: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.size}-{self.seed}"

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


class CellError(RunFailedError):
    """Some cells failed, for the given reasons; all other cells are finished."""


def run_cells(
    cells: Sequence[Cell],
    work: Callable[[Cell], dict[str, Any]],
    folder: Path,
    *,
    jobs: int = 1,
    console: Console | None = None,
) -> None:
    """Call work(cell) for every cell without a result file, in `jobs` processes with one thread each.

    `work` and its return value must be picklable. Each result is written as soon as its cell finishes, so a killed run
    loses only the cells that were running.
    """
    if jobs < 1:
        raise ValueError(f"there must be at least 1 job, got jobs={jobs}")
    console = console or Console(quiet=True)
    waiting = [cell for cell in cells if not cell.file(folder).exists()]
    if len(waiting) < len(cells):
        console.print(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished already")
    failures: dict[str, BaseException] = {}
    with progress_bar(console) as bar:
        task = bar.add_task("cells", total=len(waiting))

        def finished(cell: Cell, future: "Future[dict[str, Any]]") -> None:
            error = future.exception()
            if error is None:
                write_json(cell.file(folder), future.result())
            else:
                failures[cell.name] = error
                # print it now: the exception is raised only after all other cells
                console.print(f"{cell.name} failed: {error}", markup=False)
            bar.update(task, advance=1, description=f"cells, last {cell.name}")

        _run_all(waiting, work, finished, jobs)
    if failures:
        reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
        raise CellError(f"{len(failures)} of {len(cells)} cells failed: {reasons}")


def _run_all(
    cells: Sequence[Cell],
    work: Callable[[Cell], dict[str, Any]],
    finished: Callable[[Cell, "Future[dict[str, Any]]"], None],
    jobs: int,
) -> None:
    """Run all cells, `jobs` at a time.

    Each job has a separate process pool. A worker that dies, for example out of memory, breaks only its own pool, so
    other cells keep running.
    """
    context = multiprocessing.get_context("spawn")
    queue, free = deque(cells), list(range(jobs))
    pools: dict[int, ProcessPoolExecutor] = {}
    running: dict[Future[dict[str, Any]], tuple[int, Cell]] = {}
    try:
        while queue or running:
            while queue and free:
                job, cell = free.pop(), queue.popleft()
                if job not in pools:
                    pools[job] = ProcessPoolExecutor(1, mp_context=context, initializer=_begin_worker)
                running[pools[job].submit(work, cell)] = job, cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, cell = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    pools.pop(job).shutdown(wait=False)
                finished(cell, future)
                free.append(job)
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def run_rounds(rounds: Sequence[Sequence[Cell]], run: Callable[[Sequence[Cell]], None]) -> None:
    """Call run(cells) for each round in order, because later cells are built from earlier ones.

    A failed cell does not stop the next rounds; its error is raised at the end.
    """
    failures = []
    for cells in rounds:
        try:
            run(cells)
        except CellError as error:
            failures.append(str(error))
    if failures:
        raise CellError("; ".join(failures))


def settings_of(file: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The settings that a result file was made with."""
    if not isinstance(settings := result.get("settings"), dict):
        raise ValueError(f"{file} is damaged: it holds no settings; remove it to run this cell again")
    return settings


def check_settings(file: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise an error if a result file has other settings than this run; the error names the first that differs."""
    if difference := _difference(stored, wanted):
        name, before, now = difference
        raise ValueError(
            f"{file} was made with other settings ({name} = {before!r}, now {now!r}); use the same settings, or "
            "another folder (folder=...)"
        )


def _difference(stored: Any, wanted: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Name, stored value and wanted value of the first setting that differs; None if all agree."""
    if not (isinstance(stored, dict) and isinstance(wanted, dict)):
        return None if stored == wanted else (name, stored, wanted)
    for key in dict.fromkeys([*wanted, *stored]):
        if found := _difference(stored.get(key), wanted.get(key), f"{name}.{key}".removeprefix(".")):
            return found
    return None


def read_cells(folder: Path) -> dict[Cell, dict[str, Any]]:
    """The results of all finished cells."""
    results = {}
    for file in sorted(folder.glob("*-*-*.json")):
        method, size, seed = file.stem.rsplit("-", 2)
        try:
            cell = Cell(method, int(size), int(seed))
        except ValueError as error:
            raise ValueError(
                f"{file} is not the result of a cell: its name must be METHOD-SIZE-SEED.json; remove it"
            ) from error
        try:
            results[cell] = read_json(file)
        except ValueError as error:
            raise ValueError(f"{error}; remove it to run this cell again") from error
    return results


def slug(backbone: str) -> str:
    """The backbone's name for file names; only the variant if that starts with the family, as in orb:orb_v3."""
    family, _, variant = backbone.partition(":")
    return (variant if variant.startswith(family) else backbone).replace(":", "_").replace("-", "_")


def _begin_worker() -> None:
    """Prepare a worker process: one thread, and no reaction to Ctrl-C.

    Ctrl-C in a worker would end only its cell, and the worker would start the next one before the parent stops it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by libraries when they are imported, so set it first
    import torch

    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """Exit when the parent process ends: without it no result is written, and the worker would start the next cell."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
