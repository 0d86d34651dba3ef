import json

import pytest
import torch
from typer.testing import CliRunner

from pmlip.cli import app
from pmlip.nbody.data import Trajectories
from pmlip.samples import Samples
from pmlip.tensor_files import write_tensors
from pmlip_bench.nbody.cells import _read_weights, judge, judge_finite
from pmlip_bench.runner import read_cells

ALL = "egnn,ensemble,blip,mc-dropout,p-egnn,p-ensemble,p-blip"


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "nbody", *arguments])


@pytest.mark.slow
def test_one_cell_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("PMLIP_CACHE", str(tmp_path / "cache"))
    arguments = ["--preset", "quick", "--methods", "p-egnn", "--sizes", "200", "--seeds", "1"]
    result = invoke(*arguments, "--out", str(tmp_path / "results"))
    assert result.exit_code == 0, result.output
    ((cell, content),) = read_cells(tmp_path / "results").items()
    assert (cell.method, cell.size, cell.seed) == ("p-egnn", 200, 0)
    assert 0 < content["test"]["crps"] < content["test_at_zero_noise"]["crps"]
    assert (tmp_path / "results" / "table.md").read_text().splitlines()[2].startswith("| 200 | p-egnn |")


@pytest.mark.slow
def test_the_quick_preset_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("PMLIP_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "results"
    result = invoke(
        "--preset", "quick", "--methods", ALL, "--sizes", "200", "--seeds", "3", "--jobs", "2", "--out", str(out)
    )
    assert result.exit_code == 0, result.output
    cells = read_cells(out)
    assert len(cells) == 21
    for cell, content in cells.items():
        assert content["cell"] == {"method": cell.method, "size": 200, "seed": cell.seed}
        assert content["test"]["mse"] > 0
        assert ("ssr" in content["test"]) == (cell.method != "egnn")
        assert content["training"]["passes"] > 0
        assert content["settings"]["data"]["particles"] == 5
    some = next(content for cell, content in cells.items() if cell.method == "p-egnn")
    assert some["samples"] == 20
    assert some["test_at_zero_noise"]["crps"] > 0
    assert some["test_three_samples"]["ssr"] > 0
    assert len(some["validation_curve"]) == 3
    assert some["equivariance_error"]["relabelling"] < 1e-5
    other = next(content for cell, content in cells.items() if cell.method == "blip")
    assert other["equivariance_error"]["relabelling"] > 1e-3
    mixed = invoke("--preset", "quick", "--no-at-rest", "--sizes", "200", "--out", str(out))
    assert mixed.exit_code == 2
    said = mixed.output.replace("\n", " ")
    assert "was made with other settings (at_rest = True, now False); use the same settings, or" in said
    assert "another folder (--out ...)" in said
    table = (out / "table.md").read_text()
    assert table.count("\n") == 2 + 7
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((out / "table.json").read_text())
    assert [row["method"] for row in rows] == ALL.split(",")
    passes = {row["method"]: row["training_passes"] for row in rows}
    for whole, part in (("ensemble", "egnn"), ("p-ensemble", "p-egnn")):
        assert passes[whole] == 2 * passes[part]  # two members of three seeds
    lost = out / "p-egnn-200-0.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    assert (
        invoke(
            "--preset", "quick", "--methods", "p-egnn", "--sizes", "200", "--seeds", "1", "--out", str(out)
        ).exit_code
        == 0
    )
    again = json.loads(lost.read_text())
    assert again["training"] == before["training"]  # what is trained is judged again, not trained again
    assert again["test"] == pytest.approx(before["test"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--methods", "p-eggn"],
            "allowed: egnn, ensemble, blip, mc-dropout, p-egnn, p-ensemble, p-blip; did you mean 'p-egnn'?",
        ),
        (["--sizes", "20000"], "a training set of 20000 is too large: the data has 10000 trajectories"),
        (["--sizes", "1000,3k"], "sizes are whole numbers of at least 1, separated by commas, got '3k'"),
        (["--sizes", "0"], "sizes are whole numbers of at least 1, separated by commas, got '0'"),
        (["--sizes", "20"], "a training set of 20 is too small for a batch of 100 trajectories; choose at least 50"),
        (["--preset", "slow"], "unknown preset 'slow'; allowed: quick, full"),
        (["--methods", "ensemble", "--seeds", "2"], "needs at least 3, got --seeds 2"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_table_of_parameters():
    result = invoke("--params")
    assert "151,428" in result.output
    assert "1.13x" in result.output


def test_trajectories_out_of_the_range_of_numbers_are_counted_and_left_out():
    values = torch.randn(5, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    data = Trajectories(values[0], values[1], torch.ones(3, 2), values[2], values[3])
    positions = values[4].flatten(0, 1) + torch.randn(7, 6, 3, generator=torch.Generator().manual_seed(1))
    system = torch.arange(3).repeat_interleave(2)
    lost = positions.clone()
    lost[4, 2] = torch.inf  # a particle of the second trajectory
    others = torch.tensor([0, 2])
    expected = judge(Samples({"positions": positions[:, system != 1]}, system[:4]), data.select(others))
    assert judge_finite(Samples({"positions": lost}, system), data) == {**expected, "lost_trajectories": 1}
    assert judge_finite(Samples({"positions": positions}, system), data) == judge(
        Samples({"positions": positions}, system), data
    )


@pytest.mark.parametrize("damage", [lambda content: content[:-100], lambda _: b"no weights"])
def test_damaged_weights_are_one_sentence(tmp_path, damage):
    file = tmp_path / "egnn-10-0.pt"
    write_tensors(file, {"settings": {}, "training": {}, "state": {"w": torch.ones(3)}})
    assert set(_read_weights(file)) == {"settings", "training", "state"}
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"egnn-10-0.pt is damaged; delete it to train it again"):
        _read_weights(file)
