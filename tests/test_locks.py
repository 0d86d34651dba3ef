"""Processes are real here: a lock that only holds within one process would protect nothing."""

import os
import signal
import subprocess
import sys

import pytest

from pmlip.errors import OutputInUseError
from pmlip.locks import locked_file, locked_folder

HOLD = """
import sys
from pmlip.locks import locked_file, locked_folder
with {lock}({output!r}):
    print("held", flush=True)
    sys.stdin.read()
"""
LOCKS = [locked_file, locked_folder]


def holding(lock, output):
    """A process that holds the lock of an output until its input ends."""
    code = HOLD.format(lock=lock.__name__, output=str(output))
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def end(process):
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize("lock", LOCKS)
def test_a_second_process_is_told_who_holds_the_output(tmp_path, lock):
    out = tmp_path / "out"
    process = holding(lock, out)
    said = rf"^{out} is being written by process {process.pid} on .+ since \d{{4}}-.+; wait until it ends, stop it, or "
    with pytest.raises(OutputInUseError, match=said), lock(out):
        pass
    end(process)
    with lock(out):
        pass


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, lock):
    process = holding(lock, tmp_path / "out")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.rglob("*lock"))  # it could not remove it
    with lock(tmp_path / "out"):
        pass
    assert not list(tmp_path.rglob("*lock"))


@pytest.mark.parametrize("lock", LOCKS)
def test_an_output_has_one_lock_under_all_its_names(tmp_path, monkeypatch, lock):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir() if lock is locked_folder else (tmp_path / "out").touch()
    (tmp_path / "link").symlink_to("out")
    with lock("out"):
        for name in ("./out", tmp_path / "out", "link"):
            with pytest.raises(OutputInUseError), lock(name):
                pass


@pytest.mark.parametrize("lock", LOCKS)
def test_other_outputs_in_the_same_folder_are_free(tmp_path, lock):
    with lock(tmp_path / "one"), lock(tmp_path / "two"):
        pass


@pytest.mark.parametrize("lock", LOCKS)
def test_nothing_is_left_where_nothing_was_written(tmp_path, lock):
    with lock(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_written_to_stays(tmp_path):
    with locked_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_ends_with_an_error(tmp_path, lock):
    with pytest.raises(KeyboardInterrupt), lock(tmp_path / "out"):
        raise KeyboardInterrupt
    with lock(tmp_path / "out"):
        pass


@pytest.mark.parametrize("lock", LOCKS)
def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path, lock):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=r"^cannot write .*/file/out: (Not a directory|File exists); give an output"),
        lock(tmp_path / "file" / "out"),
    ):
        pass


def test_a_file_system_without_locks_can_be_written(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with locked_folder(tmp_path / "out"):
        (tmp_path / "out" / "file").touch()
    assert os.listdir(tmp_path / "out") == ["file"]  # noqa: PTH208  names alone are wanted
