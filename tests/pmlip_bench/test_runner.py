import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pmlip.atomic_files import write_json
from pmlip_bench.runner import Cell, CellError, read_cells, run_cells, settings_of

CELLS = [Cell("p-egnn", size, seed) for size in (10, 20) for seed in range(2)]


def square(cell, *, note):
    """Work for the runner; it leaves a mark so that a test can count how often each cell was done."""
    with (Path(note) / cell.name).open("a") as file:
        file.write("x")
    if cell.size < 0:
        raise ValueError("sizes are positive")
    return {"value": cell.size**2 + cell.seed, "threads": os.environ["OMP_NUM_THREADS"]}


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "notes").mkdir()
    return tmp_path / "results", tmp_path / "notes"


def test_every_cell_has_its_file_and_is_done_once(folders):
    results, notes = folders
    for _ in range(2):
        run_cells(CELLS, partial(square, note=notes), results, jobs=2)
    found = read_cells(results)
    assert found.keys() == set(CELLS)
    assert found[Cell("p-egnn", 20, 1)] == {"value": 401, "threads": "1"}
    assert all((notes / cell.name).read_text() == "x" for cell in CELLS)


def test_a_cell_that_fails_does_not_stop_the_others(folders):
    results, notes = folders
    with pytest.raises(CellError, match=r"1 of 5 cells failed: egnn--1-0: sizes are positive"):
        run_cells([Cell("egnn", -1, 0), *CELLS], partial(square, note=notes), results)
    assert len(read_cells(results)) == 4


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_worker_that_dies_takes_no_other_cells_along(folders, jobs):
    results, notes = folders
    with pytest.raises(CellError, match=f"1 of 4 cells failed: {CELLS[1].name}"):
        run_cells(CELLS, partial(dies_once, note=notes, wait=jobs > 1), results, jobs=jobs)
    assert set(read_cells(results)) == {CELLS[0], CELLS[2], CELLS[3]}


def dies_once(cell, *, note, wait):
    """The second cell dies. With wait=True the first is still at work when the run has noticed that."""
    pid = Path(note) / "pid"
    if cell == CELLS[1]:
        write_json(pid, os.getpid())
        os._exit(1)
    while wait and not (pid.exists() and not is_running(json.loads(pid.read_text()))):
        time.sleep(0.05)
    return {"value": cell.seed}


def is_running(pid):
    """Until its parent has noticed that it died."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_run_is_resumed_and_gives_what_an_uninterrupted_one_gives(folders):
    results, notes = folders
    script = f"""
import sys, time
from functools import partial
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pmlip_bench.runner import run_cells
from test_runner import CELLS, stuck
if __name__ == "__main__":
    run_cells(CELLS, stuck, Path({str(results)!r}))
"""
    file = notes / "script.py"
    file.write_text(script)
    process = subprocess.Popen([sys.executable, str(file)], start_new_session=True)
    while not (results / f"{CELLS[1].name}.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert set(read_cells(results)) == set(CELLS[:2])
    run_cells(CELLS, total, results)
    assert {cell: result["value"] for cell, result in read_cells(results).items()} == {
        cell: cell.size + cell.seed for cell in CELLS
    }
    assert all(json.loads(file.read_text()) for file in results.iterdir())


@pytest.fixture
def begun(folders):
    """A run whose first cell has begun."""
    results, notes = folders
    file = notes / "script.py"
    file.write_text(f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from functools import partial
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pmlip_bench.runner import run_cells
from test_runner import CELLS, marked
if __name__ == "__main__":
    run_cells(CELLS, partial(marked, note={str(notes)!r}), Path({str(results)!r}))
""")
    process = subprocess.Popen([sys.executable, str(file)], start_new_session=True, stderr=subprocess.DEVNULL)
    while not (notes / CELLS[0].name).exists():
        assert process.poll() is None
        time.sleep(0.05)
    return process, notes


def test_an_interrupted_run_begins_no_other_cell(begun):
    """Ctrl-C reaches the workers too, which would go on with what is queued for them."""
    process, notes = begun
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=300)  # a cell takes longer
    assert [(notes / cell.name).exists() for cell in CELLS] == [True, False, False, False]


def test_workers_end_with_a_run_that_is_killed(begun):
    """The signal reaches the parent alone: its workers would work for nobody, and beside those of the next run."""
    process, notes = begun
    process.kill()
    process.wait()
    with (notes / "lock").open() as lock:
        for _ in range(3000):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            pytest.fail("the worker goes on")
    assert not (notes / CELLS[1].name).exists()


def marked(cell, *, note):
    """A cell that does not end; its worker holds a lock as long as it lives."""
    with (Path(note) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (Path(note) / cell.name).touch()
        time.sleep(600)


def total(cell):
    return {"value": cell.size + cell.seed}


def stuck(cell):
    """As `total`, but never past the first two cells."""
    if cell in CELLS[2:]:
        time.sleep(600)
    return total(cell)


def test_no_jobs_are_refused(folders):
    with pytest.raises(ValueError, match="at least 1 job, got jobs=0"):
        run_cells(CELLS, total, folders[0], jobs=0)


@pytest.mark.parametrize("content", ["", '{"value": ', "[1]", "\xff"])
def test_a_damaged_result_is_one_sentence(tmp_path, content):
    (tmp_path / "p-egnn-10-0.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"p-egnn-10-0.json is damaged: .*; remove it to run this cell again"):
        read_cells(tmp_path)


def test_a_file_that_is_no_result_is_named(tmp_path):
    (tmp_path / "notes-of-monday.json").write_text("{}")
    with pytest.raises(ValueError, match=r"notes-of-monday.json is not the result of a cell"):
        read_cells(tmp_path)


@pytest.mark.parametrize("result", [{}, {"settings": 3}])
def test_a_result_without_settings_is_damaged(tmp_path, result):
    with pytest.raises(ValueError, match="is damaged: it holds no settings; remove it to run this cell again"):
        settings_of(tmp_path / "p-egnn-10-0.json", result)
