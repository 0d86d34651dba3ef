from pathlib import Path

import pytest
import torch
from torch import nn

import pmlip
from conftest import randomise_noise
from pmlip import checkpoint, methods
from pmlip.noise.injection import vanish_with_input
from tiny import tiny_backbone

STORED = Path(__file__).parent / "checkpoints"
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return randomise_noise(pmlip.perturb(network(), noise_dim=2, sites="0"))


@pytest.fixture
def file(model, tmp_path):
    model.save(tmp_path / "model.pt")
    return tmp_path / "model.pt"


def change(file, **changes):
    content = torch.load(file, weights_only=True)
    torch.save({**content, **changes}, file)


def test_a_loaded_model_is_the_same_function(model, file):
    loaded = pmlip.load(file, backbone=network())
    for e in model.draw(3):
        assert torch.equal(loaded(X, noise=e), model(X, noise=e))
    assert loaded.origin.name == "torch.nn.modules.container.Sequential"


@pytest.mark.parametrize("version", range(1, checkpoint.FORMAT_VERSION + 1))
def test_a_file_of_every_format_version_still_loads(version):
    """Written by `python tests/test_checkpoint.py` when the format was new; its outputs are stored beside it."""
    loaded = pmlip.load(STORED / f"format-{version}.pt", backbone=network())
    expected = torch.load(STORED / f"format-{version}-outputs.pt", weights_only=True)
    torch.testing.assert_close(torch.stack([loaded(X, noise=e) for e in loaded.draw(3)]), expected)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_refused(file, keep):
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(pmlip.CheckpointError, match=r"model.pt is damaged or was not written by pmlip"):
        pmlip.load(file, backbone=network())


def test_a_foreign_file_is_refused(file):
    torch.save({"state_dict": {}}, file)
    with pytest.raises(pmlip.CheckpointError, match="was not written by pmlip"):
        pmlip.load(file)
    file.write_text("not a checkpoint at all")
    with pytest.raises(pmlip.CheckpointError, match="was not written by pmlip"):
        pmlip.load(file)


def test_a_file_that_would_execute_code_is_refused_unopened(file, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"format": "pmlip", "trap": Trap()}, file)
    with pytest.raises(pmlip.CheckpointError):
        pmlip.load(file)
    assert not (tmp_path / "executed").exists()


def test_an_incomplete_file_is_refused(file):
    torch.save({"format": "pmlip", "state": {}}, file)
    with pytest.raises(pmlip.CheckpointError, match="it lacks origin, settings, version, versions"):
        pmlip.load(file)


def test_precision_is_kept(tmp_path):
    model = randomise_noise(pmlip.perturb(tiny_backbone(dtype=torch.float32).double()))
    model.save(tmp_path / "model.pt")
    loaded = pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone(dtype=torch.float32))
    assert loaded.noise.w_z.dtype == torch.float64
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["p", "p-ensemble"])
def test_potentials_of_older_formats_have_a_straight_zero_of_their_energies(name, tmp_path):
    """Format 1 had none at all, format 2 no curvature."""
    methods.make(name, tiny_backbone()).save(tmp_path / "model.pt")
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    older = {key: value for key, value in content["state"].items() if "energy_" not in key}
    assert len(older) < len(content["state"])
    change(tmp_path / "model.pt", version=1, state=older)
    loaded = pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone())
    assert not any(part.energy_curvature.any() or part.energy_zero.any() for part in loaded.learner().parts())


def test_a_newer_format_is_refused(file):
    change(file, version=checkpoint.FORMAT_VERSION + 1, versions={"pmlip": "9.0"})
    with pytest.raises(
        pmlip.CheckpointError, match=r"written by pmlip 9.0; the installed version reads formats up to 5"
    ):
        pmlip.load(file, backbone=network())


def test_a_module_without_adapter_must_be_handed_in(file):
    with pytest.raises(pmlip.CheckpointError, match=r"made from a .*Sequential; pass one as backbone="):
        pmlip.load(file)


def test_a_wrong_backbone_is_refused(file):
    with pytest.raises(pmlip.CheckpointError, match=r"made from .*Sequential, not from tiny:test"):
        pmlip.load(file, backbone=tiny_backbone())
    wider = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    with pytest.raises(pmlip.CheckpointError, match="do not fit this backbone"):
        pmlip.load(file, backbone=wider)


def test_a_pretrained_backbone_with_other_weights_is_refused(tmp_path):
    pmlip.perturb(tiny_backbone(seed=0)).save(tmp_path / "model.pt")
    assert pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone(seed=0))
    with pytest.raises(pmlip.CheckpointError, match=r"tiny:test with weights \w{12}, but this backbone has"):
        pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone(seed=1))


def test_envelopes_of_ones_own_must_be_given_again(tmp_path):
    for backbone, name in ((network(), "0"), (tiny_backbone(), "message.0")):
        sites = [pmlip.Site(name, envelope=nn.Identity())]
        pmlip.perturb(backbone, sites=sites).save(tmp_path / "model.pt")
        with pytest.raises(pmlip.CheckpointError, match="custom envelopes, which are not stored; pass sites="):
            pmlip.load(tmp_path / "model.pt", backbone=backbone)
        loaded = pmlip.load(tmp_path / "model.pt", backbone=backbone, sites=sites)
        assert loaded.sites[0].envelope is sites[0].envelope is not vanish_with_input


def test_an_interrupted_save_leaves_the_old_file(model, file, monkeypatch):
    before = file.read_bytes()

    def interrupted(content, target):
        target.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.save(file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_missing_file_is_said():
    with pytest.raises(FileNotFoundError, match=r"there is no file nowhere.pt"):
        pmlip.load("nowhere.pt")


if __name__ == "__main__":  # stores a file of the present format version
    torch.manual_seed(1)
    stored = randomise_noise(pmlip.perturb(network(), noise_dim=2, sites="0"), scale=1.0)
    stored.save(STORED / f"format-{checkpoint.FORMAT_VERSION}.pt")
    outputs = torch.stack([stored(X, noise=e) for e in stored.draw(3)]).detach()
    torch.save(outputs, STORED / f"format-{checkpoint.FORMAT_VERSION}-outputs.pt")
