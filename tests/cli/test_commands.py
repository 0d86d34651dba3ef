"""The commands as a user types them, on the real CHGNet and the silica set that ships with the package."""

import json
import os
import re
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
from typer.testing import CliRunner

import pmlip
from pmlip import evaluation, methods
from pmlip.cli import app
from pmlip.cli.finetune import _tensorboard
from pmlip.cli.score_table import legend
from pmlip.structures.labels import fingerprint
from pmlip.tensor_files import CHECKSUM, write_tensors

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")

pytestmark = pytest.mark.usefixtures("quick_energy_zero")

SILICA = Path(str(resources.files("pmlip") / "data" / "silica_pbe.extxyz.xz"))
COUNT = 319
SHORT = ["--count", "6", "--epochs", "1", "--batch", "3", "--samples", "2", "--validations", "1"]
SHORT += ["--validation-samples", "4", "--noise-rate", "0.05"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory, quick_energy_zero):
    out = tmp_path_factory.mktemp("run") / "p-chgnet"
    result = invoke("finetune", SILICA, "--out", out, "--tensorboard", *SHORT)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_finetune_says_what_it_found_and_leaves_a_model(finetuned):
    out, text = finetuned
    said = " ".join(text.split())
    assert f"{COUNT} structures of 6 to 24 atoms (Si, O); labels: energy ('energy', {COUNT} of {COUNT})" in said
    assert "held out for validation, chosen at random: 2 structures; training: 6" in said
    assert "at least 4 validation structures with non-zero forces, and there are 2" in said
    assert {file.name for file in out.iterdir()} == {"model.pt", "last.pt", "log.jsonl", "summary.json", "tensorboard"}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["train"]["structures"] == 6
    assert summary["config"]["samples"] == 2
    assert set(summary["error_before"]) == {"energy", "forces", "stress"}
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert "valid" in lines[-1]


def test_tensorboard_shows_no_step_twice_and_loses_none(tmp_path):
    """Of an ensemble that goes on, each finished part says first that it is finished."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with _tensorboard(tmp_path) as write_curves:
        for step in (1, 2, 3, 4, 5):
            write_curves(step, {"loss": 10.0 - step})
    with _tensorboard(tmp_path) as write_curves:  # a part of three steps is finished, the next was saved at its first
        write_curves(3, {})
        write_curves(4, {})
        write_curves(5, {"loss": 5.0})
        write_curves(6, {"loss": 4.0, "valid": 1.0})
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in curves.Scalars("loss")] == [(n, 10.0 - n) for n in range(1, 7)]
    assert [event.step for event in curves.Scalars("valid")] == [6]


@pytest.mark.slow
def test_the_spread_is_scaled_to_the_validation_structures(tmp_path):
    write(tmp_path / "valid.extxyz", read(SILICA, index=":4"))
    given = ["finetune", SILICA, "--valid", tmp_path / "valid.extxyz", *SHORT]
    scaled, as_trained = (
        invoke(*given, "--out", tmp_path / "a"),
        invoke(*given, "--no-calibrate", "--out", tmp_path / "b"),
    )
    assert scaled.exit_code == as_trained.exit_code == 0, scaled.output + as_trained.output
    calibration = json.loads((tmp_path / "a" / "summary.json").read_text())["calibration"]
    assert calibration["data"] == "valid.extxyz"
    assert calibration["crps"][1] <= calibration["crps"][0]
    assert "calibration" not in json.loads((tmp_path / "b" / "summary.json").read_text())
    after, before = (pmlip.load(tmp_path / name / "model.pt").noise.w_z for name in ("a", "b"))
    torch.testing.assert_close(after, calibration["factor"] * before)
    # a run that was stopped while it calibrated, or is asked for again, ends with the same model
    (tmp_path / "a" / "model.pt").unlink()
    assert invoke(*given, "--out", tmp_path / "a").exit_code == 0
    assert torch.equal(pmlip.load(tmp_path / "a" / "model.pt").noise.w_z, after)


def test_finished_runs_are_not_run_again(finetuned):
    out, _ = finetuned
    before = torch.load(out / "model.pt", weights_only=True)["state"]
    result = invoke("finetune", SILICA, "--out", out, "--json", *SHORT)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((out / "summary.json").read_text())
    after = torch.load(out / "model.pt", weights_only=True)["state"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_evaluate_leaves_out_what_was_trained_on(finetuned, tmp_path):
    """Also where other labels are read: here no stress."""
    out, _ = finetuned
    some = read(SILICA, index=":30")
    for atoms in some:
        atoms.calc.results.pop("stress")
    write(tmp_path / "some.extxyz", some)
    seen = set(json.loads((out / "summary.json").read_text())["seen"])
    known = sum(fingerprint([atoms])[:16] in seen for atoms in some)
    result = invoke(
        "evaluate", out / "model.pt", tmp_path / "some.extxyz", "--samples", "3", "--count", "2", "--exclude", out
    )
    said = " ".join(result.output.split())
    assert f"{known} of 30 structures were excluded because the run in" in said
    assert legend("SSR", "|F| alone", "beyond |F|", "best possible") in said
    without = invoke("evaluate", out, tmp_path / "some.extxyz", "--samples", "3", "--count", "2")
    assert f"trained or calibrated on {known} of 30 structures" in " ".join(without.output.split())
    arguments = ["--samples", "3", "--count", "5", "--exclude", out, "--unseen", SILICA, "--json"]
    result = invoke("evaluate", out / "model.pt", SILICA, *arguments, "--out", tmp_path / "scores.json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "scores.json").read_text())
    assert printed["model"] == "p-chgnet"  # every file of a run is called model.pt
    forces = printed["silica_pbe.extxyz.xz"]["forces"]
    assert forces["crps"] > 0
    assert "spearman_atom_of_force" in forces
    everything = invoke("evaluate", out / "model.pt", SILICA, "--samples", "3", "--count", COUNT, "--exclude", out)
    assert everything.exit_code == 2
    assert f"--count {COUNT} is too large: {SILICA} has {COUNT - 8} structures to choose from" in " ".join(
        everything.output.split()
    )
    table = invoke("evaluate", out / "model.pt", SILICA, "--samples", "3", "--count", "4").output
    assert "SSR" in table
    assert "|F| alone" in table
    last = "silica_pbe.extxyz.xz has fewer than 8 structures, too few to judge the force error bars; "
    assert printed["verdict_text"].startswith(last)
    assert re.search(rf"{last}[^;]*\.$", " ".join(table.split()))
    assert printed["verdict"] == "fair"


def test_a_report_of_two_models_side_by_side(finetuned, tmp_path):
    pytest.importorskip("chemiscope", reason="the report needs chemiscope")
    out, _ = finetuned
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "test.extxyz", read(SILICA, index=":3" if name == "a" else "3:6"))
    arguments = [
        "evaluate",
        out / "model.pt",
        tmp_path / "a" / "test.extxyz",
        "--unseen",
        tmp_path / "b" / "test.extxyz",
    ]
    (tmp_path / "other.pt").write_bytes((out / "model.pt").read_bytes())
    arguments += ["--compare", tmp_path / "other.pt", "--samples", "3", "--report", tmp_path / "report.html", "--json"]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    inside, outside = (str(tmp_path / name / "test.extxyz") for name in ("a", "b"))
    assert {inside, outside, "compared"} <= record.keys()
    # up to rounding, in which it shows how the work was cut
    forces, of_other = record[inside]["forces"], record["compared"]["other"][inside]["forces"]
    for name in ("mae", "crps", "spread", "ssr"):
        assert of_other[name] == pytest.approx(forces[name], rel=1e-3)
    against, of_other = record[outside]["against"][inside], record["compared"]["other"][outside]["against"][inside]
    assert of_other == pytest.approx(against, rel=1e-3)
    text = (tmp_path / "report.html").read_text()
    for name in ("p-chgnet", "other"):
        assert re.search(rf"{name}: \d+ % of the forces lie outside", text)


def test_a_model_that_cannot_be_compared_stops_the_command_before_the_first_evaluation(
    finetuned, tmp_path, monkeypatch
):
    pytest.importorskip("chemiscope", reason="the report needs chemiscope")
    evaluated = []
    monkeypatch.setattr(evaluation, "evaluate", lambda model, *_, **__: evaluated.append(model))
    methods.make("deterministic", pmlip.load_backbone("chgnet")).save(tmp_path / "plain.pt")
    write(tmp_path / "test.extxyz", read(SILICA, index=":3"))
    given = ["evaluate", finetuned[0] / "model.pt", tmp_path / "test.extxyz", "--compare", tmp_path / "plain.pt"]
    result = invoke(*given, "--report", tmp_path / "report.html")
    assert result.exit_code == 2
    assert "this model predicts no spread, because it has a single sample" in " ".join(result.stderr.split())
    assert not evaluated


@pytest.mark.slow
def test_two_processes_by_torchrun_give_what_one_gives(tmp_path):
    """Deterministic, since from zero noise weights the first step of P is decided by rounding.

    In single precision rounding also decides the first step of weights whose gradient is nearly zero, so what the
    models predict is compared; `test_training` compares the weights, in double precision.
    """
    structures = read(SILICA, index=":4")
    ends = [pmlip.perturb(pmlip.load_backbone("chgnet")).predict(structures).forces]
    for processes in (1, 2):
        out = tmp_path / str(processes)
        launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [sys.executable, *launcher, "-m", "pmlip", "finetune", str(SILICA), "--method", "deterministic"]
        command += ["--backbone-rate", "0.001", "--out", str(out), *SHORT]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=600)
        ends.append(pmlip.load(out / "model.pt").predict(structures).forces)
    before, one, two = ends
    assert float((two - one).abs().max()) < 0.05 * float((one - before).abs().max())


def labelled(atoms, **results):
    copied = atoms.copy()
    copied.calc = SinglePointCalculator(copied, **results)
    return copied


def wrong_files(folder):
    """Files with a fault, each with the arguments and the sentence it must give."""
    good = read(SILICA, index=":6")
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
    write(folder / "half.extxyz", [labelled(atoms, energy=0.1) for atoms in renamed])
    (folder / "empty.extxyz").touch()
    unknown = [atoms.copy() for atoms in good]
    for copied, atoms in zip(unknown, good, strict=True):
        copied.info["REF_energy"], copied.arrays["REF_forces"] = atoms.get_potential_energy(), atoms.get_forces()
    unknown[3].arrays["REF_forces"][1, 2] = np.nan
    write(folder / "nan.extxyz", unknown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["element.extxyz"], "element.extxyz: structure 4 (Og2): CHGNet does not know Og"),
        (
            ["forceless.extxyz"],
            "forceless.extxyz: structure 2 (O6Si3): it carries no forces, and 3 of 4 structures do; remove it, or pass "
            "--missing to allow missing labels",
        ),
        (["empty.extxyz"], "empty.extxyz is empty"),
        (["none.extxyz"], "there is no file none.extxyz"),
        (
            ["renamed.extxyz"],
            "pbe_energy, pbe_forces, displacement. Pass the names of the labels as --energy-key ..., --forces-key ..., "
            "--stress-key ...",
        ),
        (
            ["half.extxyz"],
            "half.extxyz: none of the structures carries forces; names in the file: energy, id, part",
        ),
        (
            [str(SILICA), "--valid", "half.extxyz"],
            "pbe_forces, displacement. If one of these holds the forces, pass its name as --forces-key ...; to train "
            "without forces, pass --forces 0",
        ),
        (["nan.extxyz"], "nan.extxyz: structure 3 (O8Si4): its label 'forces' is NaN or infinite"),
        (["few.extxyz"], "few.extxyz holds 3 structures, too few to train on 1 and hold out 2"),
        ([str(SILICA), "--backbone", "chgnet:9"], "unknown CHGNet variant '9'"),
        ([str(SILICA), "--method", "blib"], "unknown method 'blib'"),
        ([str(SILICA), "--batch", "0"], "batch must be at least 1, got 0"),
        ([str(SILICA), "--method", "ensemble", "--option", "members"], "written name=number, got 'members'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    wrong_files(tmp_path)
    result = invoke("finetune", *arguments, "--out", "out")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_of_some_structures_of_a_file_the_bad_one_has_its_number_in_the_file(finetuned, tmp_path):
    wrong_files(tmp_path)
    result = invoke("evaluate", finetuned[0] / "model.pt", tmp_path / "element.extxyz", "--count", "5", "--seed", "1")
    assert result.exit_code == 2
    assert "element.extxyz: structure 4 (Og2): CHGNet does not know Og" in " ".join(result.stderr.split())


def test_a_checkpoint_of_another_backbone_is_refused(finetuned, tmp_path):
    pytest.importorskip("orb_models", reason="backbone 'orb' is not installed")
    content = torch.load(finetuned[0] / "model.pt", weights_only=True)
    content["origin"]["name"] = "chgnet:r2scan"
    content.pop(CHECKSUM)
    write_tensors(tmp_path / "other.pt", content)
    result = invoke("evaluate", tmp_path / "other.pt", SILICA)
    assert result.exit_code == 2
    assert "was made from chgnet:r2scan with weights" in " ".join(result.output.split())
    (tmp_path / "text.pt").write_text("not a model")
    result = invoke("evaluate", tmp_path / "text.pt", SILICA)
    assert result.exit_code == 2
    assert "is damaged or was not written by pmlip" in " ".join(result.output.split())


def test_predict_annotates_structures(finetuned, tmp_path):
    out, _ = finetuned
    write(tmp_path / "four.extxyz", read(SILICA, index=":4"))
    arguments = ["predict", out / "model.pt", tmp_path / "four.extxyz", "--samples", "3"]
    result = invoke(*arguments, "--out", tmp_path / "out.extxyz", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["structures"] == 4
    found = read(tmp_path / "out.extxyz", index=":")
    assert all(atoms.arrays["atom_uncertainty"].min() > 0 for atoms in found)
    assert all({"REF_energy", "stress_uncertainty"} <= atoms.info.keys() for atoms in found)
    again = invoke(*arguments, "--out", tmp_path / "out.extxyz")
    assert again.exit_code == 2
    assert "exists already" in " ".join(again.stderr.split())


def test_info_tells_what_a_model_is(finetuned, tmp_path):
    out, _ = finetuned
    record = json.loads(invoke("info", out / "model.pt", "--json").stdout)
    assert record["backbone"] == "chgnet:0.3.0"
    assert record["train"] == {"file": "silica_pbe.extxyz.xz", "structures": 6}
    assert record["config"]["epochs"] == 1
    assert record["validation"]["forces"] > 0
    assert record["versions"]["pmlip"]
    shown = " ".join(invoke("info", out / "model.pt").output.split())
    assert "chgnet:0.3.0" in shown
    assert "silica_pbe.extxyz.xz" in shown
    refused = invoke("info", SILICA)
    assert refused.exit_code == 2
    assert "is damaged or was not written by pmlip" in " ".join(refused.stderr.split())


def test_fold_writes_a_file_of_the_package_itself(finetuned, tmp_path):
    from chgnet.model.dynamics import CHGNetCalculator
    from chgnet.model.model import CHGNet

    out, _ = finetuned
    result = invoke("fold", out / "model.pt", "--sample", "2", "--out", tmp_path / "sample.pth.tar")
    assert result.exit_code == 0, result.output
    atoms = read(SILICA, index=0)
    assert "leaves out the tangent part" in " ".join(result.output.split())
    model = pmlip.load(out / "model.pt")
    assert not model.members_are_whole
    model.tangent = None
    expected = model.sample(atoms, samples=3).forces[2]
    plain = CHGNetCalculator(CHGNet.from_file(tmp_path / "sample.pth.tar"), use_device="cpu")
    np.testing.assert_allclose(plain.get_forces(atoms.copy()), expected, atol=1e-4)


def test_calibrate_stores_the_scale(finetuned, tmp_path):
    out, _ = finetuned
    write(tmp_path / "valid.extxyz", read(SILICA, index=":3"))
    arguments = [out / "model.pt", tmp_path / "valid.extxyz", "--samples", "4", "--out", tmp_path / "scaled.pt"]
    result = invoke("calibrate", *arguments)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "The spread was multiplied by" in said
    assert "No conformal intervals: intervals with guaranteed 95% coverage need more than 3 structures." in said
    assert "have no second factor, because its fit needs at least 8 structures with energies" in said
    calibration = json.loads(invoke("info", tmp_path / "scaled.pt", "--json").stdout)["calibration"]
    assert calibration["data"] == "valid.extxyz"
    before, after = (pmlip.load(file).noise.w_z for file in (out / "model.pt", tmp_path / "scaled.pt"))
    torch.testing.assert_close(after, calibration["factor"] * before)


def test_calibrate_fits_energies_and_says_so(finetuned, tmp_path):
    out, _ = finetuned
    write(tmp_path / "valid.extxyz", read(SILICA, index=":8"))
    files = (out / "model.pt", tmp_path / "valid.extxyz", "--out", tmp_path / "scaled.pt")
    result = invoke("calibrate", *files, "--samples", "4")
    assert result.exit_code == 0, result.output
    factor = pmlip.load(tmp_path / "scaled.pt").calibration.energy_factor
    assert f"Energy error bars have a second factor, {factor:.2f}: SSR" in " ".join(result.output.split())
    assert f"energy_factor {factor:.4g}" in " ".join(
        invoke("info", tmp_path / "scaled.pt").output.replace("│", " ").split()
    )
    # what evaluate and predict report
    given = (tmp_path / "scaled.pt", tmp_path / "valid.extxyz", "--samples", "4")
    scored = invoke("evaluate", *given)
    assert re.search(
        r"(error bars|spread) of the energies (is|are) .* on valid.extxyz", " ".join(scored.output.split())
    )
    ends = ("label some of them and train again.", "lies outside the training set.")
    assert " ".join(scored.output.split()).endswith(ends)
    assert invoke("predict", *given, "--out", tmp_path / "out.extxyz").exit_code == 0
    drawn = pmlip.load(tmp_path / "scaled.pt").sample(read(SILICA, index=0), samples=4)
    reported = read(tmp_path / "out.extxyz", 0).info["energy_uncertainty"]
    assert reported == pytest.approx(factor * float(drawn.spread.energy[0]), rel=1e-3)


@pytest.mark.slow
def test_a_settings_file_and_flags_mean_the_same(tmp_path):
    (tmp_path / "short.toml").write_text(
        f'train = "{SILICA}"\nbackbone = "chgnet"\ncount = 6\nepochs = 3\nbatch = 3\nsamples = 2\nnoise-rate = 0.05\n'
    )
    by_file = invoke("finetune", "--settings", tmp_path / "short.toml", "--epochs", "2", "--dry-run", "--out", "x")
    by_flags = invoke(
        *("finetune", SILICA, "--count", "6", "--epochs", "2", "--batch", "3", "--samples", "2"),
        *("--noise-rate", "0.05", "--dry-run", "--out", "x"),
    )
    assert by_file.exit_code == by_flags.exit_code == 0, by_file.output
    settings, timing = by_file.stdout.rsplit("#", 1)
    assert settings == by_flags.stdout.rsplit("#", 1)[0]
    assert "epochs = 2" in settings
    assert "noise_rate = 0.05" in settings
    assert "4 steps of" in timing
    (tmp_path / "printed.toml").write_text(by_file.stdout)
    again = invoke("finetune", "--settings", tmp_path / "printed.toml", "--dry-run")
    assert again.stdout.rsplit("#", 1)[0] == settings
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 2", "there is no setting 'epoch'; allowed: train, dry_run, valid, count"),
        ("epochs = ", "is not TOML"),
        ('epochs = "many"', "unable to parse string as an integer"),
    ],
)
def test_a_wrong_settings_file_is_refused(tmp_path, text, message):
    (tmp_path / "wrong.toml").write_text(text)
    result = invoke("finetune", SILICA, "--settings", tmp_path / "wrong.toml")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_novelty_is_added_to_a_model_that_has_none(tmp_path):
    data = read(SILICA, ":")
    methods.make("deterministic", pmlip.load_backbone("chgnet")).save(tmp_path / "plain.pt")
    write(tmp_path / "train.extxyz", data[:3])
    write(tmp_path / "valid.extxyz", data[3:5])
    refused = invoke("predict", tmp_path / "plain.pt", tmp_path / "valid.extxyz", "--samples", "0")
    assert refused.exit_code == 2
    assert "or run pmlip novelty" in " ".join(refused.output.split())
    files = (tmp_path / "train.extxyz", "--valid", tmp_path / "valid.extxyz", "--out", tmp_path / "new.pt")
    result = invoke("novelty", tmp_path / "plain.pt", *files)
    assert result.exit_code == 0, result.output
    assert "compared with 3 training structures" in " ".join(result.output.split())
    out = tmp_path / "predicted.extxyz"
    assert (
        invoke("predict", tmp_path / "new.pt", tmp_path / "valid.extxyz", "--samples", "0", "--out", out).exit_code == 0
    )
    expected = pmlip.load(tmp_path / "new.pt").novelty(data[3])
    assert read(out, 0).info["novelty"] == pytest.approx(float(expected.structure[0]), rel=1e-5)
