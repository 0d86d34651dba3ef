"""Outputs are checked before anything is read or computed, so these files need not hold models or structures."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pmlip.cli import app
from pmlip.cli.checks import check_new_file, check_output, chosen_device
from pmlip.locks import locked_folder
from pmlip.training.distributed import Processes

INPUTS = ["model.pt", "other.pt", "data.extxyz", "unseen.extxyz", "settings.toml", "weights.bin", "run/summary.json"]
INPUTS += ["link.json", "run/../data.extxyz"]  # other names of an input
READ_ONLY = Path("/sys")  # for the administrator too
NEW_FILES = {  # commands whose output must not exist yet
    "predict": ["model.pt", "data.extxyz"],
    "calibrate": ["model.pt", "data.extxyz"],
    "novelty": ["model.pt", "data.extxyz"],
    "fold": ["model.pt"],
}
FOLDERS = {  # commands that write a folder
    "finetune": ["data.extxyz"],
    "bench nbody": ["--preset", "quick"],
    "bench nbody-trials": [],
    "bench nbody-ablation": [],
    "bench silica": [],
    "bench silica-trials": [],
    "bench ethanol": ["--data", "."],
    "bench symmetry": ["chgnet"],
    "bench speed": [],
}


@pytest.fixture(autouse=True)
def _inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data.extxyz", "unseen.extxyz", "settings.toml", "weights.bin"):
        Path(name).touch()
    for name in ("model.pt", "other.pt", "unrelated.pt"):
        Path(name).write_bytes(b"PK\x03\x04 as torch writes it")
    Path("run").mkdir()
    Path("run/summary.json").write_text("{}")
    Path("link.json").symlink_to("data.extxyz")


def refused(*arguments):
    """The error of a command that stops at its input, which leaves all files as they were."""
    before = content(Path())
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 2, result.output
    assert content(Path()) == before
    (line,) = result.stderr.splitlines()
    return line


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("option", ["--out", "--report"])
@pytest.mark.parametrize("file", INPUTS)
def test_evaluate_overwrites_no_input(option, file):
    if option == "--report":
        pytest.importorskip("chemiscope", reason="the report needs chemiscope")
    inputs = ["model.pt", "data.extxyz", "--compare", "other.pt", "--unseen", "unseen.extxyz", "--exclude", "run"]
    inputs += ["--settings", "settings.toml", "--weights", "weights.bin"]
    line = refused("evaluate", *inputs, option, file)
    assert line == f"error: cannot write {Path(file)}: it is an input of this command; give another name"


@pytest.mark.parametrize("option", ["--weights", "--valid", "--settings"])
def test_finetune_overwrites_no_input(option):
    Path("run/model.pt").touch()
    line = refused("finetune", "data.extxyz", option, "run/model.pt", "--out", "run")
    assert line == "error: cannot write run/model.pt: it is an input of this command; give another name"


def test_evaluate_overwrites_no_model():
    line = refused("evaluate", "model.pt", "data.extxyz", "--out", "unrelated.pt")
    assert line == "error: cannot write unrelated.pt: it is a model file or another archive; give another name"


def test_scores_and_report_do_not_overwrite_each_other():
    pytest.importorskip("chemiscope", reason="the report needs chemiscope")
    line = refused("evaluate", "model.pt", "data.extxyz", "--out", "scores", "--report", "run/../scores")
    assert "error: --out and --report are both scores" in line


@pytest.mark.parametrize("command", NEW_FILES)
@pytest.mark.parametrize("file", ["model.pt", "data.extxyz", "unrelated.pt", "run"])
def test_other_commands_overwrite_nothing(command, file):
    line = refused(command, *NEW_FILES[command], "--out", file)
    assert line == f"error: {file} exists already; remove it, or give another name"


def test_earlier_scores_and_reports_may_be_overwritten():
    Path("scores.json").write_text("{}")
    check_output(Path("scores.json"), inputs=[Path("model.pt"), Path("absent.pt"), None])


@pytest.mark.parametrize("command", ["evaluate", *NEW_FILES])
def test_a_file_that_cannot_be_written_is_refused_at_once(command):
    given = [command, *NEW_FILES.get(command, ["model.pt", "data.extxyz"])]
    assert refused(*given, "--out", "none/file") == "error: cannot write file: there is no folder none"
    if not READ_ONLY.is_dir():
        pytest.skip(f"there is no {READ_ONLY}")
    line = refused(*given, "--out", READ_ONLY / "file.extxyz")
    assert line.startswith(f"error: cannot write {READ_ONLY / 'file.extxyz'}: ")
    assert line.endswith("; give a file that can be written")


def test_a_folder_is_no_output_file():
    assert "run: it is a folder; give the name of a file" in refused("evaluate", "model.pt", "data", "--out", "run")


def test_a_check_leaves_no_file():
    before = content(Path())
    check_new_file(Path("new.json"))
    assert content(Path()) == before


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_cannot_be_written_is_refused_at_once(command):
    if not READ_ONLY.is_dir():
        pytest.skip(f"there is no {READ_ONLY}")
    line = refused(*command.split(), *FOLDERS[command], "--out", READ_ONLY / "a" / "b")
    assert line.startswith(f"error: cannot write {READ_ONLY / 'a' / 'b'}: ")
    assert line.endswith("; give an output that can be written")


@pytest.mark.parametrize("command", FOLDERS)
def test_a_second_command_on_the_same_folder_is_refused(command):
    with locked_folder("run"):
        line = refused(*command.split(), *FOLDERS[command], "--out", "run")
    assert line.startswith(f"error: run is being written by process {os.getpid()} on ")
    assert line.endswith("; wait until it ends, stop it, or give another output")


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_holds_the_folder(rank, monkeypatch):
    monkeypatch.setattr(Processes, "start", lambda device: Processes(rank=rank, count=2))
    with locked_folder("run"):
        line = refused("finetune", "data.extxyz", "--method", "misspelt", "--out", "run")
    assert ("is being written by" if rank == 0 else "unknown method 'misspelt'") in line


def test_a_dry_run_needs_no_folder():
    with locked_folder("run"):
        assert "unknown method" in refused("finetune", "data.extxyz", "--method", "x", "--dry-run", "--out", "run")


@pytest.mark.parametrize("device", ["foo", "", "meta", "cuda:99", "cpu:x", "xla"])
def test_a_device_that_cannot_be_used_is_one_sentence(device):
    with pytest.raises(ValueError, match=rf"device '{device}' is not available on this machine; allowed: cpu") as found:
        chosen_device(device)
    assert "\n" not in str(found.value)


def test_the_processor_is_always_available():
    assert chosen_device("cpu") == "cpu"
    assert chosen_device(None)
