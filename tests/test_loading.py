"""Files written before the modules were regrouped: one of each method, and a folded model, which is a pickle."""

from pathlib import Path

import pytest
import torch

import pmlip
from molecules import molecules
from tiny import tiny_backbone

STORED = Path(__file__).parent / "checkpoints" / "before_the_move"
METHODS = sorted(file.stem for file in STORED.glob("*.pt") if not file.stem.endswith("-outputs"))


def load(name):
    return pmlip.load(STORED / f"{name}.pt", backbone=tiny_backbone(dtype=torch.float32))


def test_there_is_a_file_of_each_method():
    newer = {"novelty", "novelty-latent"}
    assert set(METHODS) == set(pmlip.methods.available()) - {"confidence"} - newer


@pytest.mark.parametrize("name", METHODS)
def test_a_model_gives_the_same_samples_as_before(name):
    loaded, expected = load(name), torch.load(STORED / f"{name}-outputs.pt", weights_only=True)
    samples = loaded.sample(molecules(2), samples=len(expected["energy"]), seed=1)
    torch.testing.assert_close(samples.energy, expected["energy"], rtol=0, atol=1e-4)
    torch.testing.assert_close(samples.forces, expected["forces"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_the_record_of_older_files_becomes_history_and_calibration(name):
    loaded = load(name)
    assert loaded.history.config["epochs"] == 1
    assert loaded.history.energy_offsets
    if name in ("p", "p-ensemble"):
        assert loaded.calibration.data == "valid.extxyz"
        assert loaded.calibration.samples == 4
        assert len(loaded.calibration.crps) == 2
    else:
        assert loaded.calibration is None


def test_a_folded_radial_layer_still_unpickles():
    pytest.importorskip("e3nn", reason="the layer is one of e3nn")
    folded = torch.load(STORED / "folded-radial.pickle", weights_only=False)
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    expected = torch.load(STORED / "folded-radial-outputs.pt", weights_only=True)
    torch.testing.assert_close(folded(x).detach(), expected)
