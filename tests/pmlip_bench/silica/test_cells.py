import json
from dataclasses import replace

import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from typer.testing import CliRunner

from pmlip import datasets
from pmlip.atomic_files import write_json
from pmlip.cli import app
from pmlip.tangent import passes_of_fit
from pmlip.training.config import FinetuneConfig
from pmlip_bench.runner import Cell
from pmlip_bench.silica import cells as benchmark
from pmlip_bench.silica import tables
from pmlip_bench.silica.cells import made_of
from pmlip_bench.silica.data import SilicaSettings, splits
from pmlip_bench.silica.variants import BEFORE, FORMERLY
from silica_files import in_kcal, silica
from small_orb import WIDTHS, small

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")

COMPOSED = ("constant", "ensemble")  # of deterministic fine-tunings


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "silica", *map(str, arguments)])


@pytest.mark.slow
def test_from_end_to_end(tmp_path):
    write(tmp_path / "small.extxyz", datasets.silica_pbe("train")[:40])
    write(tmp_path / "hot.extxyz", datasets.silica_pbe("hot")[:4])
    arguments = [
        "--data",
        tmp_path / "small.extxyz",
        "--methods",
        "p,constant,ensemble",
        "--sizes",
        "6",
        "--seeds",
        "1",
        "--test",
        "4",
        "--steps",
        "2",
    ]
    arguments += ["--samples", "4", "--unseen", tmp_path / "hot.extxyz", "--jobs", "2", "--out", tmp_path]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    cell = json.loads((tmp_path / "chgnet-small-p-6-0.json").read_text())
    assert cell["cell"] == {"backbone": "chgnet", "data": "small", "method": "p", "size": 6, "seed": 0}
    assert {"force_mae", "force_crps", "spearman", "ssr", "energy_crps", "spearman_of_force"} <= cell["test"].keys()
    assert cell["samples"] == 4
    ratio = cell["test"]["force_spread"] / cell["test_as_trained"]["force_spread"]
    assert ratio == pytest.approx(cell["spread_factor"], rel=1e-4)
    assert cell["settings"]["data"] == "small.extxyz"
    assert 0 <= cell["unseen"]["hot"]["auroc_spread"] <= 1
    assert -1 <= cell["test_and_unseen"]["spearman"] <= 1
    plain = json.loads((tmp_path / "chgnet-small-deterministic-6-0.json").read_text())
    assert "ssr" not in plain["test"]
    base = json.loads((tmp_path / "chgnet-small-p+no-tangent-6-0.json").read_text())
    assert plain["training"]["passes"] * (4 + 1) == base["training"]["passes"]  # four samples, and one without noise
    assert cell["training"]["passes"] == base["training"]["passes"] + passes_of_fit(6)
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n") == 4 + 5
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    around, three = (json.loads((tmp_path / f"chgnet-small-{name}-6-0.json").read_text()) for name in COMPOSED)
    assert around["test"]["force_mae_without_noise"] == plain["test"]["force_mae"]  # the same potential
    assert around["training"] == plain["training"]
    assert three["samples"] == 3
    assert three["training"]["passes"] == 3 * plain["training"]["passes"]
    (tmp_path / "chgnet-small-p-6-0.json").unlink()
    before = (tmp_path / "chgnet-small-ensemble-6-0.json").stat().st_mtime_ns
    assert "5 of 5 cells are finished already" in invoke(*arguments).output
    assert (tmp_path / "chgnet-small-ensemble-6-0.json").stat().st_mtime_ns == before
    again = json.loads((tmp_path / "chgnet-small-p-6-0.json").read_text())
    assert again["training"] == cell["training"]  # read from its file, seconds and all
    for name in ("force_mae", "force_crps", "force_spread"):  # up to rounding, in which it shows how the work was cut
        assert again["test"][name] == pytest.approx(cell["test"][name], rel=1e-3)
    kept = list((tmp_path / "weights").iterdir())  # each model with its settings, and no state of a run
    assert {file.suffix for file in kept} == {".pt", ".json"}
    assert all(file.with_suffix(suffix) in kept for file in kept for suffix in (".pt", ".json"))
    changed = [*arguments[:-6], "--samples", "5", "--out", tmp_path]
    other = invoke(*changed)
    assert other.exit_code == 2
    assert "was made with other settings" in " ".join(other.output.split())


def test_the_ensemble_of_a_seed_leaves_its_own_out_of_four():
    members = {seed: [part.seed for part in made_of(Cell("chgnet-small-ensemble", 6, seed))] for seed in (0, 3, 5)}
    assert members == {0: [1, 2, 3], 3: [0, 1, 2], 5: [4, 6, 7]}
    assert made_of(Cell("chgnet-small-p-ensemble", 6, 3)) == [Cell("chgnet-small-p", 6, seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "blibb"], "did you mean 'blip'?"),
        (["--data", "silica-pbe", "--unseen", "edi.npz"], "silica-pbe includes labels, a test set and unseen sets"),
        (["--energy-key", "e"], "a test set and unseen sets; omit --energy-key ... or choose other data"),
        (["--methods", "blip+pubished"], "unknown variant 'blip+pubished'; allowed: blip, blip+published"),
        (["--test", "20"], "--test 20 cannot be used here, because silica-pbe includes a test set"),
        (
            ["--sizes", "32,161"],
            "161 structures are needed to train on, but silica-pbe has 160; choose a smaller training size",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments, message, tmp_path):
    result = invoke(*arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_structures_that_cannot_be_used_are_refused_with_their_place_in_the_file(tmp_path):
    structures = datasets.silica_pbe("train")[:30]
    del structures[7].calc.results["forces"]
    write(tmp_path / "forceless.extxyz", structures)
    structures[7] = structures[8].copy()
    structures[7].numbers[0] = 118
    structures[7].calc = SinglePointCalculator(structures[7], **structures[8].calc.results)
    write(tmp_path / "element.extxyz", structures)
    for name, reason in (("forceless", "it has no forces"), ("element", "CHGNet does not know Og")):
        result = invoke("--data", tmp_path / f"{name}.extxyz", "--test", "4", "--sizes", "4", "--out", tmp_path)
        assert result.exit_code == 2
        words = " ".join(result.output.split())
        assert f"{name}.extxyz: structure 7 (" in words
        assert reason in words


def test_labels_may_have_names_of_their_own(tmp_path):
    given = datasets.silica_pbe("train")[:3]
    renamed = [atoms.copy() for atoms in given]
    for atoms, own in zip(renamed, given, strict=True):
        atoms.info["e_pbe"], atoms.arrays["f_pbe"] = own.get_potential_energy(), own.get_forces()
    write(tmp_path / "renamed.extxyz", renamed)
    settings = SilicaSettings(
        backbone="chgnet", data=str(tmp_path / "renamed.extxyz"), energy_key="e_pbe", forces_key="f_pbe"
    )
    read = settings.read(settings.data)
    assert [atoms.get_potential_energy() for atoms in read] == [atoms.get_potential_energy() for atoms in given]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_energy_zero")
def test_the_command_for_the_setting_of_the_paper_with_a_small_orb_and_a_file_of_its_form(tmp_path, monkeypatch):
    """Training from the front of one file, test on another, kcal/mol, weights of Orb-v3 from a local file."""
    import orb_models.forcefield.pretrained as package

    write(tmp_path / "train.xyz", in_kcal(silica(5)), format="extxyz")
    write(tmp_path / "test.xyz", in_kcal(silica(4, seed=1)), format="extxyz")
    small("direct").save(tmp_path / "small.ckpt")
    architecture = package.orb_v3_direct_architecture
    monkeypatch.setattr(package, "orb_v3_direct_architecture", lambda **given: architecture(**WIDTHS, **given))

    def in_this_process(cells, job, folder, **_):  # where Orb is small
        for cell in cells:
            write_json(cell.file(folder), job(cell))

    monkeypatch.setattr(benchmark, "run_cells", in_this_process)
    for method in ("p", "blip"):
        monkeypatch.setitem(tables.PAPER, (method, 3), tables.PAPER[method, 32])
    backbone, out = "orb:orb_v3_direct_20_omat", tmp_path / "results"
    data, test_data = (f"tan_silica:{tmp_path / name}" for name in ("train.xyz", "test.xyz"))
    arguments = ["--backbone", backbone, "--weights", tmp_path / "small.ckpt", "--data", data, "--test-data", test_data]
    arguments += ["--methods", "p,p+paper,blip+published", "--seeds", 1, "--device", "cpu"]
    short = ["--samples", 4, "--steps", 2, "--batch", 2, "--chunk", 1]
    result = invoke(*arguments, "--sizes", 3, *short, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert {row["method"]: row["paper_force_crps"]["mean"] for row in rows} == pytest.approx(
        {"p": 1.94e-3, "p+no-tangent": 1.94e-3, "p+paper": 1.94e-3, "blip+published": 5.78e-3}
    )
    assert (out / "table.md").read_text().count("(paper ") == 12
    assert (out / "figure.png").exists()
    stored = json.loads((out / "orb_v3_direct_20_omat-train-blip+published-3-0.json").read_text())
    assert stored["test"]["force_crps"] > 0
    assert stored["settings"]["data"] == "tan_silica:train.xyz"
    assert stored["settings"]["config"]["clip"] == 0.5
    parts = splits(3, SilicaSettings(backbone=backbone, data=data, test_data=test_data))
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (3, 2, 4)
    result = invoke(*arguments, "--sizes", 5, "--out", out)
    assert result.exit_code == 2
    assert "6 structures are needed to train and validate on" in " ".join(result.output.split())


def test_cells_from_before_a_setting_was_there_belong_to_what_was_done_then(tmp_path):
    """p+paper scores energies as all did then; p does not any more."""
    settings = SilicaSettings(backbone="chgnet", data="silica-pbe", config=replace(BEFORE, steps=None))
    for name in ("p+paper", "blip+published"):
        cell = Cell(f"chgnet-silica_pbe-{name}", 8, 0)
        stored = benchmark._described(settings, cell, splits(8, settings).hash)
        for later in FORMERLY:
            del stored["config"][later]
        write_json(cell.file(tmp_path), {"settings": stored})
    benchmark._check_stored("chgnet-silica_pbe", settings, tmp_path)
    settings = replace(settings, config=FinetuneConfig())
    (tmp_path / "chgnet-silica_pbe-p+paper-8-0.json").unlink()
    (tmp_path / "chgnet-silica_pbe-blip+published-8-0.json").unlink()
    cell = Cell("chgnet-silica_pbe-p", 8, 0)
    stored["config"] = {**benchmark._described(settings, cell, "")["config"]}
    del stored["config"]["common_energy"]
    write_json(cell.file(tmp_path), {"settings": stored})
    with pytest.raises(ValueError, match=r"other settings \(config.common_energy = 1.0, now 0.1\)"):
        benchmark._check_stored("chgnet-silica_pbe", settings, tmp_path)
