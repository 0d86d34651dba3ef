from pathlib import Path

import pytest
from rich.console import Console

import pmlip
from pmlip.cli import demo

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")


@pytest.mark.usefixtures("quick_energy_zero")
def test_the_demo_trains_shows_and_saves(tmp_path: Path, monkeypatch):
    for name, small in (("TRAINING", 8), ("VALIDATION", 2), ("TEST_SAMPLES", 3)):
        monkeypatch.setattr(demo, name, small)
    whole = demo.datasets.silica_pbe
    monkeypatch.setattr(demo.datasets, "silica_pbe", lambda part: whole(part)[:8])
    console = Console(record=True, width=140)
    demo.run(tmp_path, steps=2, seed=0, console=console)
    text = console.export_text()
    rows = [line for line in text.splitlines() if any(f" {name} " in line for name in demo.TESTS.values())]
    assert len(rows) == len(demo.TESTS)
    numbers = [float(cell) for cell in rows[-1].split("│")[2:-1]]  # MAE, CRPS, ..., AUROC
    assert 0 <= numbers[-1] <= 1
    for name in ("spread-and-error.png", "unseen.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "P-CHGNet on as in training" in (tmp_path / "report.html").read_text()
    assert pmlip.load(tmp_path / "p-chgnet.pt").trained
