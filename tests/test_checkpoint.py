from pathlib import Path

import pytest
import torch
from torch import nn

import pmlip
from conftest import randomise_noise
from pmlip import checkpoint, methods
from pmlip.noise.injection import vanish_with_input
from pmlip.tensor_files import CHECKSUM, write_tensors
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
    """Change entries of a file, as a program would that writes the same format."""
    content = torch.load(file, weights_only=True)
    write_tensors(file, {name: value for name, value in {**content, **changes}.items() if name != CHECKSUM})


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


def test_a_flipped_bit_is_an_error_or_changes_nothing(model, file):
    """Nothing: in the padding of the file, and in fields of the zip format that torch does not read."""
    whole, expected, refused = file.read_bytes(), model(X, noise=model.draw(1)[0]), 0
    for place in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            loaded = pmlip.load(file, backbone=network())
        except pmlip.CheckpointError:
            refused += 1
        else:
            assert torch.equal(loaded(X, noise=loaded.draw(1)[0]), expected)
    assert refused > len(whole) / 50


def test_a_flipped_bit_in_a_weight_is_refused(model, file):
    weights = model.noise.w_z.detach().numpy().tobytes()
    content = bytearray(file.read_bytes())
    place = content.find(weights)
    assert place > 0
    content[place + 3] ^= 0x40  # in the exponent
    file.write_bytes(content)
    with pytest.raises(pmlip.CheckpointError, match="is damaged: its content does not match its checksum"):
        pmlip.load(file, backbone=network())


def test_a_checksum_cannot_be_left_out(file):
    content = torch.load(file, weights_only=True)
    content.pop(CHECKSUM)
    torch.save(content, file)
    with pytest.raises(pmlip.CheckpointError, match="is damaged: its content does not match its checksum"):
        pmlip.load(file, backbone=network())


HISTORY = {"config": {"epochs": 1}, "steps": 3}
CALIBRATION = {"factor": 1.0, "crps": (1.0, 1.0), "ssr": (1.0, 1.0), "level": 0.9, "conformal": None}
CALIBRATION |= {"structures": 3, "samples": 4}
CURVATURE = {"centre": torch.zeros(3), "vectors": torch.eye(3)[:2], "values": torch.ones(2), "floor": 1.0}
FEATURES = {"kind": "latent", "curvatures": {8: CURVATURE}, "sources": ["0"], "structures": 3}
SITE = {"name": "0", "rows": "row", "custom_envelope": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "6"}, "version is of type str, not int"),
        ({"versions": 3}, "versions is of type int"),
        ({"origin": {"name": "x"}}, "missing 2 required"),
        ({"origin": {"name": "x", "adapter": 1, "weights": ""}}, "adapter is of type int, not bool"),
        ({"origin": None}, "None"),
        ({"state": {"0.weight": 1.0}}, "is of type float, not Tensor"),
        ({"state": [torch.zeros(3)]}, "state is of type list"),
        ({"settings": {"noise_dim": 2}}, "is of type NoneType"),
        ({"settings": {"noise_dim": 2, "sites": [{"name": "0"}]}}, "'rows'"),
        ({"settings": {"noise_dim": 10**12, "sites": [SITE]}}, "but noise_dim is 1000000000000"),
        ({"settings": {"method": 1}}, "is of type int, not str"),
        ({"settings": {"method": "ensemble", "options": {"members": 10**9}}}, "no weights of 1000000000 members"),
        ({"history": {**HISTORY, "steps": "many"}}, "steps is of type str, not int"),
        ({"history": 3}, "int"),
        ({"calibration": {**CALIBRATION, "conformal": "wide"}}, "conformal is of type str"),
        ({"calibration": {"factor": 1.0}}, "missing"),
        ({"training_features": {"latent": {**FEATURES, "curvatures": {8: {**CURVATURE, "floor": 0.0}}}}}, "positive"),
        (
            {"training_features": {"latent": {**FEATURES, "curvatures": {8: {**CURVATURE, "values": torch.ones(3)}}}}},
            "eigenvectors of shape",
        ),
        ({"training_features": {"gradients": FEATURES}}, "are stored as 'gradients'"),
        ({"training_features": 3}, "int"),
    ],
)
@pytest.mark.parametrize("version", [5, checkpoint.FORMAT_VERSION])
def test_any_other_structure_is_one_sentence(file, changes, message, version):
    """Also without a checksum, and also if a program wrote one for it."""
    change(file, **{"version": version, **changes})
    with pytest.raises(pmlip.CheckpointError, match=rf"model.pt is damaged: .*{message}") as found:
        pmlip.load(file, backbone=network())
    assert "\n" not in str(found.value)


def test_settings_that_do_not_fit_are_one_sentence(tmp_path):
    methods.make("mc-dropout", tiny_backbone()).save(tmp_path / "model.pt")
    for settings in ({"method": "mc-dropout", "options": {"share": "x"}}, {"method": "none", "options": {}}):
        change(tmp_path / "model.pt", settings=settings)
        with pytest.raises(pmlip.CheckpointError, match=r"the settings in .*model.pt do not fit this backbone: "):
            pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone())
    change(tmp_path / "model.pt", settings={"method": "mc-dropout", "options": {}})
    change(tmp_path / "model.pt", origin=vars(checkpoint.Origin.of(network())))
    with pytest.raises(pmlip.CheckpointError, match="mc-dropout needs a potential, got a Sequential"):
        pmlip.load(tmp_path / "model.pt", backbone=network())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.full((2, 2), torch.nan), r"its weight noise.w_z is NaN or infinite"),
        (torch.full((2, 2), torch.inf), r"its weight noise.w_z is NaN or infinite"),
        (torch.eye(2).long(), r"do not fit this backbone: noise.w_z is stored as torch.int64"),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused(file, value, message):
    change(file, state={**torch.load(file, weights_only=True)["state"], "noise.w_z": value})
    with pytest.raises(pmlip.CheckpointError, match=message):
        pmlip.load(file, backbone=network())


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
        pmlip.CheckpointError, match=r"written by pmlip 9.0; the installed version reads formats up to 6"
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
