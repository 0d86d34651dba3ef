import pytest

import pmlip
from conftest import randomise_noise
from pmlip.run_folder import model_file
from tiny import TinyNetwork


def test_a_folder_stands_for_its_model(tmp_path):
    model = randomise_noise(pmlip.perturb(TinyNetwork(), sites="message.*", noise_dim=2))
    model.save(tmp_path / "model.pt")
    assert model_file(tmp_path) == model_file(tmp_path / "model.pt") == tmp_path / "model.pt"
    loaded = pmlip.load(tmp_path, backbone=TinyNetwork())
    assert loaded.noise.w_z.equal(model.noise.w_z)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no model\.pt: if it is the folder of an unfinished run"):
        pmlip.load(tmp_path)
