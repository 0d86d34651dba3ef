import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pmlip.cli import app
from pmlip_bench import speed, speed_tables


def test_the_crps_table_and_its_result_file(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "ENTRIES", 200)
    monkeypatch.setattr(speed, "SAMPLES", (5, 30))
    monkeypatch.setattr(speed, "PAIRS", 30 * 30 * 50)
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    speed.run("crps", tmp_path, Console(quiet=True))
    result = json.loads((tmp_path / "crps.json").read_text())
    assert len(result["rows"]) == 2 * 2 * 3
    assert all(row["seconds"] > 0 for row in result["rows"])
    measured = {(row["samples"], row["contestant"]): row["entries_measured"] for row in result["rows"]}
    assert measured[30, "double sum"] == 50  # the rest is scaled, and said to be
    assert measured[30, "pmlip"] == 200
    assert result["versions"]["torch"]
    assert result["machine"]["cores"]


def test_the_nbody_table_and_its_result_file(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr("pmlip_bench.nbody.training.shutil.which", lambda name: None)  # compiling takes half a minute
    speed.run("nbody", tmp_path, Console(quiet=True))
    rows = json.loads((tmp_path / "nbody.json").read_text())["rows"]
    assert all(row["ratio"] == pytest.approx(row["plain"] / row["seconds"]) for row in rows)


def test_an_unknown_part_is_bad_input():
    result = CliRunner().invoke(app, ["bench", "speed", "--only", "colour"])
    assert result.exit_code == 2
    assert "allowed: crps, nbody" in result.output


@pytest.mark.parametrize("command", [[], ["bench"], ["bench", "speed"], ["demo"]])
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_prediction_beside_the_stock_calculator():
    pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
    result = speed.measure_predict(Console(quiet=True), count=3, samples=2)
    (row,) = result["rows"]
    assert row["ratio"] == row["stock"] / row["seconds"]
    assert "| chgnet | " in speed_tables.predict_markdown([result])
