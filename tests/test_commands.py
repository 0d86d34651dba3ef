"""The commands as a user types them, on the real CHGNet and the DFT structures of quartz that ship with the package."""

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from typer.main import get_command
from typer.testing import CliRunner

import pmlip
from pmlip.cli import app

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")

QUARTZ = Path(str(resources.files("pmlip") / "data" / "quartz_pbe.extxyz"))
SHORT = ["--count", "6", "--epochs", "1", "--batch", "3", "--samples", "2", "--validations", "1"]
SHORT += ["--validation-samples", "4", "--noise-rate", "0.05"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "p-chgnet"
    result = invoke("finetune", QUARTZ, "--out", out, "--tensorboard", *SHORT)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_finetune_says_what_it_found_and_leaves_a_model(finetuned):
    out, text = finetuned
    said = " ".join(text.split())
    assert "56 structures of 9 atoms (Si, O); labels: energy ('energy', 56 of 56)" in said
    assert "held out for validation: 2 of them" in said
    assert {file.name for file in out.iterdir()} == {"model.pt", "last.pt", "log.jsonl", "summary.json", "tensorboard"}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["train"]["structures"] == 6
    assert summary["config"]["samples"] == 2
    assert set(summary["error_before"]) == {"energy", "forces", "stress"}
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert "valid" in lines[-1]


def test_finished_runs_are_not_run_again(finetuned):
    out, _ = finetuned
    before = torch.load(out / "model.pt", weights_only=True)["state"]
    result = invoke("finetune", QUARTZ, "--out", out, *SHORT)
    assert result.exit_code == 0, result.output
    after = torch.load(out / "model.pt", weights_only=True)["state"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_evaluate_leaves_out_what_was_trained_on(finetuned, tmp_path):
    out, _ = finetuned
    arguments = ["--samples", "3", "--count", "5", "--exclude", out, "--unseen", QUARTZ, "--json"]
    result = invoke("evaluate", out / "model.pt", QUARTZ, *arguments, "--out", tmp_path / "scores.json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "scores.json").read_text())
    forces = printed["quartz_pbe.extxyz"]["forces"]
    assert forces["crps"] > 0
    assert "spearman_atom_of_force" in forces
    everything = invoke("evaluate", out / "model.pt", QUARTZ, "--samples", "3", "--count", "49", "--exclude", out)
    assert everything.exit_code == 2
    assert "holds 48 to choose from" in " ".join(everything.output.split())
    table = invoke("evaluate", out / "model.pt", QUARTZ, "--samples", "3", "--count", "4").output
    assert "SSR" in table
    assert "|F| alone" in table


def test_two_processes_by_torchrun_give_what_one_gives(tmp_path):
    """Deterministic, since from zero noise weights the first step of P is decided by rounding.

    In single precision rounding also decides the first step of weights whose gradient is nearly zero, so what the
    models predict is compared; `test_training` compares the weights, in double precision.
    """
    structures = read(QUARTZ, index=":4")
    ends = [pmlip.perturb(pmlip.load_backbone("chgnet")).predict(structures).forces]
    for processes in (1, 2):
        out = tmp_path / str(processes)
        launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [sys.executable, *launcher, "-m", "pmlip", "finetune", str(QUARTZ), "--method", "deterministic"]
        command += ["--backbone-rate", "0.001", "--out", str(out), *SHORT]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=180)
        ends.append(pmlip.load(out / "model.pt").predict(structures).forces)
    before, one, two = ends
    assert float((two - one).abs().max()) < 0.05 * float((one - before).abs().max())


def labelled(atoms, **results):
    copied = atoms.copy()
    copied.calc = SinglePointCalculator(copied, **results)
    return copied


def wrong_files(folder):
    """Files with a fault, each with the arguments and the sentence it must give."""
    good = read(QUARTZ, index=":6")
    element = Atoms("Og2", [[0, 0, 0], [0, 0, 2.0]], cell=[8, 8, 8], pbc=True)
    element = labelled(element, energy=-1.0, forces=np.zeros((2, 3)), stress=np.zeros(6))
    write(folder / "element.extxyz", [*good[:4], element, good[5]])
    bare = labelled(good[2], energy=good[2].get_potential_energy(), stress=good[2].get_stress())
    write(folder / "forceless.extxyz", [*good[:2], bare, *good[3:]])
    write(folder / "few.extxyz", good[:3])
    renamed = []
    for atoms in good:
        copied = atoms.copy()
        copied.info["pbe_energy"], copied.arrays["pbe_forces"] = atoms.get_potential_energy(), atoms.get_forces()
        renamed.append(copied)
    write(folder / "renamed.extxyz", renamed)
    (folder / "empty.extxyz").touch()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["element.extxyz"], "element.extxyz: structure 4 (Og2): CHGNet does not know Og"),
        (["forceless.extxyz"], "forceless.extxyz: structure 2 (O6Si3): it carries no forces, and 5 of 6 structures do"),
        (["empty.extxyz"], "empty.extxyz is empty"),
        (["none.extxyz"], "there is no file none.extxyz"),
        (
            ["renamed.extxyz"],
            "kind, rattle, pbe_energy, pbe_forces. Say which are the labels with --energy-key",
        ),
        (["few.extxyz"], "few.extxyz holds 3 structures, too few to train on 1 and hold out 2"),
        ([str(QUARTZ), "--backbone", "chgnet:9"], "unknown CHGNet variant '9'"),
        ([str(QUARTZ), "--method", "blib"], "unknown method 'blib'"),
        ([str(QUARTZ), "--batch", "0"], "batch must be at least 1, got 0"),
        ([str(QUARTZ), "--method", "ensemble", "--option", "members"], "written name=number, got 'members'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    wrong_files(tmp_path)
    result = invoke("finetune", *arguments, "--out", "out")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_backbone_is_refused(finetuned, tmp_path):
    pytest.importorskip("orb_models", reason="backbone 'orb' is not installed")
    content = torch.load(finetuned[0] / "model.pt", weights_only=True)
    content["origin"]["name"] = "chgnet:r2scan"
    torch.save(content, tmp_path / "other.pt")
    result = invoke("evaluate", tmp_path / "other.pt", QUARTZ)
    assert result.exit_code == 2
    assert "was made from chgnet:r2scan with weights" in " ".join(result.output.split())
    (tmp_path / "text.pt").write_text("not a model")
    result = invoke("evaluate", tmp_path / "text.pt", QUARTZ)
    assert result.exit_code == 2
    assert "is damaged or was not written by pmlip" in " ".join(result.output.split())


def test_every_setting_has_its_meaning_in_the_help():
    from pmlip.training import FinetuneConfig

    options = {option.name: option.help for option in get_command(app).commands["finetune"].params}
    for name in FinetuneConfig.__dataclass_fields__:
        assert options[name]
