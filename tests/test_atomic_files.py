import json
import os

import pytest
import torch

from pmlip.atomic_files import atomic_write, read_json, write_json
from pmlip.locks import take


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    with atomic_write(tmp_path / "file") as file:
        file.write(b"content")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == b"content"


def test_an_interrupted_write_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("old")

    def interrupted():
        with atomic_write(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208  names alone are wanted


def test_json_into_folders_that_are_not_there_yet(tmp_path):
    write_json(tmp_path / "a" / "b.json", {"x": [1, 2]})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {"x": [1, 2]}


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    write_json(tmp_path / "ours", {})
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path):
    left = tmp_path / ".file.4242.partial"
    left.write_bytes(b"half")
    others = [tmp_path / ".file.old.4242.partial", tmp_path / ".file.partial", tmp_path / "file.4242.partial"]
    for other in others:
        other.touch()
    write_json(tmp_path / "file", {})
    assert not left.exists()
    assert all(other.exists() for other in others)


def test_what_another_process_is_writing_stays(tmp_path):
    with take(tmp_path / ".file.4242.partial"):
        write_json(tmp_path / "file", {})
        assert (tmp_path / ".file.4242.partial").exists()


def test_a_write_starts_from_nothing(tmp_path):
    """The number of a process that died may be given to another one."""
    (tmp_path / f".file.{os.getpid()}.partial").write_bytes(b"what was left")
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize(
    "save", [lambda file: file.write(b"x"), lambda file: torch.save({"x": torch.zeros(10**6)}, file)]
)
def test_a_full_disk_names_the_file(tmp_path, monkeypatch, save):
    def full(*_, **__):
        return open("/dev/full", "wb")  # noqa: PTH123  as `take` does

    monkeypatch.setattr("pmlip.atomic_files.take", full)
    with (
        pytest.raises(OSError, match=r"^cannot write .*/file: No space left on device; free some space"),
        atomic_write(tmp_path / "file") as file,
    ):
        save(file)
    assert not (tmp_path / "file").exists()


def test_a_mistake_in_the_code_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match=r"^mistake$"), atomic_write(tmp_path / "file"):
        raise RuntimeError("mistake")


def test_json_is_read_back_and_damage_is_one_sentence(tmp_path):
    write_json(tmp_path / "file.json", {"a": [1, None]})
    assert read_json(tmp_path / "file.json") == {"a": [1, None]}
    for content in (b"", b'{"a": ', b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "file.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"file.json is damaged: it is not JSON"):
            read_json(tmp_path / "file.json")
    (tmp_path / "file.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"is damaged: it holds a list instead of named values"):
        read_json(tmp_path / "file.json")
