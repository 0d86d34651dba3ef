"""Bad arguments and bad structures on the command line: one sentence, exit code 2, and no files left behind."""

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.io import read, write
from typer.testing import CliRunner

import pmlip
from conftest import randomise_noise
from pmlip.cli import app

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "model.pt"
    randomise_noise(pmlip.perturb(pmlip.load_backbone("chgnet"), noise_dim=8)).save(file)
    return file


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Run a command on the model in an empty folder; it must fail and leave the folder as it was."""
    monkeypatch.chdir(tmp_path)

    def invoke(command, *arguments):
        before = sorted(tmp_path.iterdir())
        result = CliRunner().invoke(app, [command, str(model), *map(str, arguments)])
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        assert sorted(tmp_path.iterdir()) == before
        return " ".join(result.stderr.split())

    return invoke


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", 10**9], "at most 10000 samples can be drawn, got --samples 1000000000"),
        (["--seed", 2**32], "a seed must be an integer from 0 to 2^32 - 1, got --seed 4294967296"),
        (["--seed", -1], "Invalid value for '--seed'"),
        (["--device", "foo"], "device 'foo' is not available on this machine; allowed: cpu"),
        (["--device", "meta"], "device 'meta' is not available on this machine; allowed: cpu"),
    ],
)
def test_bad_arguments_of_predict(run, tmp_path, arguments, message):
    write(tmp_path / "in.extxyz", bulk("NaCl", "rocksalt", a=5.6))
    assert message in run("predict", "in.extxyz", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sample", 2**31], "samples are numbered from 0 to 2147483647, got --sample 2147483648"),
        (["--seed", 10**30], "a seed must be an integer from 0 to 2^32 - 1, got --seed"),
    ],
)
def test_bad_arguments_of_fold(run, arguments, message):
    assert message in run("fold", "--out", "sample.pth.tar", *arguments)


def test_a_late_sample_is_folded_at_once(model, tmp_path):
    result = CliRunner().invoke(
        app, ["fold", str(model), "--sample", "3000000", "--out", str(tmp_path / "one.pth.tar")]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("atoms", "message"),
    [
        (bulk("NaCl", "rocksalt", a=5.6e-3), "Å thick"),
        (bulk("NaCl", "rocksalt", a=5.6e9), "allowed: up to 100000 Å"),
        (Atoms("H2", np.zeros((2, 3))), "atoms 0 and 1 are 0 Å apart"),
        (Atoms("H2", [[0, 0, 0], [0, 0, 0.7]], cell=[[3, 0, 0], [3, 0, 0], [0, 0, 3]], pbc=True), "in one plane"),
        (Atoms(numbers=[1, 200], positions=[[0, 0, 0], [0, 0, 0.7]]), "has the atomic number 200"),
    ],
)
def test_structures_that_mean_nothing(run, tmp_path, atoms, message):
    """The second of a file that ASE reads."""
    good = bulk("NaCl", "rocksalt", a=5.6)
    write(tmp_path / "in.traj", [good, atoms])
    said = run("predict", "in.traj")
    assert "in.traj: structure 1 (" in said
    assert message in said


@pytest.mark.parametrize("name", ["in.db", "in.npz", "in.traj", "in.extxyz", "in.extxyz.gz", "in.extxyz.xz"])
def test_files_of_garbage(run, tmp_path, name):
    (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(500))
    assert f"error: {name}: it cannot be read: " in run("predict", name)


def test_predictions_of_good_structures_are_not_affected(model, tmp_path):
    write(tmp_path / "in.extxyz", bulk("NaCl", "rocksalt", a=5.6))
    arguments = [
        "predict",
        str(model),
        str(tmp_path / "in.extxyz"),
        "--samples",
        "2",
        "--out",
        str(tmp_path / "out.xyz"),
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert len(read(tmp_path / "out.xyz", ":")) == 1
