import itertools
import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pmlip.cli import app
from pmlip_bench import speed, speed_tables


@pytest.fixture
def measured(monkeypatch):
    """Makes the clock of the benchmark show given durations, in the order in which it measures."""

    def measured(durations):
        ticks = itertools.chain.from_iterable((0.0, seconds) for seconds in durations)
        clock = SimpleNamespace(perf_counter=lambda: next(ticks), process_time=lambda: next(ticks))
        monkeypatch.setattr(speed, "time", clock)
        monkeypatch.setattr(speed, "SECONDS", 0.0)  # one run for each measurement

    return measured


def test_the_crps_table_and_its_result_file(tmp_path, monkeypatch, measured):
    monkeypatch.setattr(speed, "ENTRIES", 200)
    monkeypatch.setattr(speed, "SAMPLES", (5, 30))
    monkeypatch.setattr(speed, "PAIRS", 30 * 30 * 50)
    measured(itertools.repeat(0.5))
    speed.run("crps", tmp_path, Console(quiet=True))
    result = json.loads((tmp_path / "crps.json").read_text())
    assert len(result["rows"]) == 2 * 2 * 3
    found = {(row["samples"], row["contestant"]): (row["entries_measured"], row["seconds"]) for row in result["rows"]}
    assert found[30, "pmlip"] == (200, 0.5)
    assert found[30, "double sum"] == (50, 0.5 * 200 / 50)  # a part is measured, and its time scaled to the whole
    assert result["versions"]["torch"]
    assert result["machine"]["cores"]


def test_the_nbody_table_and_its_result_file(tmp_path, monkeypatch, measured):
    measured([0.01, 0.25, 2.0, 0.5])  # our step, the textbook's, 2000 trajectories of ours, one of the plain loop
    monkeypatch.setattr("pmlip_bench.nbody.training.shutil.which", lambda name: None)  # compiling takes half a minute
    speed.run("nbody", tmp_path, Console(quiet=True))
    result = json.loads((tmp_path / "nbody.json").read_text())
    assert [row["ratio"] for row in result["rows"]] == pytest.approx([25, 500])
    step, trajectory = speed_tables.nbody_markdown(result).splitlines()[2:]
    assert step.endswith("| 10.00 ms | 250.0 ms | 25.0 |")
    assert trajectory.endswith("| 1.00 ms | 500.0 ms | 500.0 |")


def test_an_unknown_part_is_bad_input():
    result = CliRunner().invoke(app, ["bench", "speed", "--only", "colour"])
    assert result.exit_code == 2
    assert "allowed: crps, nbody" in result.output


@pytest.mark.parametrize("command", [[], ["bench"], ["bench", "speed"], ["demo"]])
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_step_with_novelty_beside_one_without(measured):
    """Each round measures the stock calculator, the pass without novelty, site gradients and latent features."""
    pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
    measured([8.0, 2.0, 3.0, 2.5])
    result = speed.measure_novelty(Console(quiet=True), train=4, repeats=[(1, 1, 1)], rounds=1)
    assert [row["times_plain"] for row in result["rows"]] == [1.5, 1.25]
    assert [row["times_stock"] for row in result["rows"]] == [3.0 / 8, 2.5 / 8]
    lines = speed_tables.novelty_markdown([result]).splitlines()[2:]
    assert lines[0] == "| chgnet | 9 | site gradients | 3000 ms | 1.50 | 0.38 |"
    assert lines[1] == "| chgnet | 9 | latent features | 2500 ms | 1.25 | 0.31 |"


def test_prediction_beside_the_stock_calculator(measured):
    """Seconds per structure and sample: of ours 3 structures are measured, of the stock calculator 1."""
    pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
    measured([12.0, 8.0, 4.0])  # our samples together, the stock calculator's one by one
    result = speed.measure_predict(Console(quiet=True), count=3, samples=2)
    assert result["rows"] == [{"backbone": "chgnet", "seconds": 2.0, "stock": 6.0, "ratio": 3.0}]
    assert "| chgnet | 2000.0 ms | 6000.0 ms | 3.00 |" in speed_tables.predict_markdown([result])
