from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import pmlip
from pmlip import demo
from pmlip.structures import labels

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")


def test_the_quartz_set_is_labelled_and_split():
    data = demo.quartz()
    assert {name: len(structures) for name, structures in data.items()} == {"train": 16, "test": 10, "strong": 30}
    out = labels([atoms for structures in data.values() for atoms in structures])
    assert all(bool(value.isfinite().all()) for value in out.values())
    forces = out.forces.reshape(-1, 9, 3)
    assert float(forces.sum(1).abs().max()) < 0.02  # eV/Å, no net force but for the grid of the plane waves
    magnitude = {name: float(labels(structures).forces.square().mean().sqrt()) for name, structures in data.items()}
    assert magnitude["strong"] > 1.5 * magnitude["test"]


def test_the_demo_trains_shows_and_saves(tmp_path: Path):
    console = Console(record=True, width=120)
    demo.run(tmp_path, steps=2, seed=0, console=console)
    text = console.export_text()
    assert "stronger distortions" in text
    assert (tmp_path / "spread-and-error.png").read_bytes().startswith(b"\x89PNG")
    model = pmlip.load(tmp_path / "p-chgnet.pt")
    assert model.trained


def test_training_the_noise_lowers_the_crps_and_leaves_chgnet_alone():
    from pmlip.scores import fair_crps

    torch.manual_seed(0)
    backbone = pmlip.load_backbone("chgnet")
    model = pmlip.perturb(backbone)
    structures = demo.quartz()["train"][:4]
    target = labels(structures).forces
    demo.train_noise(model, structures, steps=12, seed=0, console=Console(quiet=True))
    crps = fair_crps(model.sample(structures, samples=16).forces.double(), target).mean()
    point = model.predict(structures).forces
    assert float(crps) < 0.97 * float((point - target).abs().mean())
    np.testing.assert_allclose(point, pmlip.perturb(backbone).predict(structures).forces, atol=1e-4)
