from pathlib import Path

import pytest
from typer.testing import CliRunner

import pmlip
from pmlip import datasets
from pmlip.cli import app, demo

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_energy_zero")
def test_the_demo_trains_shows_and_saves(tmp_path: Path, monkeypatch):
    for name, small in (("TRAINING", 8), ("VALIDATION", 2), ("TESTED", 8), ("TEST_SAMPLES", 3)):
        monkeypatch.setattr(demo, name, small)
    whole = datasets.silica_pbe
    monkeypatch.setattr(datasets, "silica_pbe", lambda part: whole(part)[:8])
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--steps", "2"], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if any(f" {name} " in line for name in demo.TESTS.values())]
    rows = [line for line in rows if line.startswith("│")]  # of the table, not of the progress bar
    assert len(rows) == len(demo.TESTS)
    *numbers, outside = rows[-1].split("│")[2:-1]  # MAE, CRPS, ..., AUROC, AUROC of novelty, outside
    assert all(0 <= float(number) <= 1 for number in numbers[-2:])
    assert outside.strip() in {f"{count} of 8" for count in range(9)}
    said = " ".join(result.stdout.split())
    assert "structures of other polymorphs lie outside the training set: label some of them and train again." in said
    for name in ("spread-and-error.png", "unseen.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "P-CHGNet on the test set" in (tmp_path / "report.html").read_text()
    assert pmlip.load(tmp_path / "p-chgnet.pt").trained
