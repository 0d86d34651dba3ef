import sys

import pytest
import torch
from ase.build import molecule

import pmlip
from conftest import randomise_noise
from contract import BackboneContract, rotated, rotation
from pmlip import backbones
from pmlip.backbones import weights_hash
from tiny import CUTOFF, tiny_backbone


@pytest.fixture(scope="class")
def backbone():
    return tiny_backbone()


class TestContractOfTheTestsOwnBackbone(BackboneContract):
    """The contract holds for a backbone that keeps every symmetry exactly, to double precision."""

    energy_tolerance = 1e-13
    force_tolerance = 1e-12
    cutoffs = (CUTOFF,)

    def load(self, path, backbone):
        return pmlip.load(path, backbone=backbone)  # it has no name outside the tests


def test_each_sample_is_exactly_equivariant():
    """E(3): a rotation or reflection and a translation, in double precision, for 20 samples."""
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=1.0)
    atoms = molecule("CH3CH2OH")
    expected = model.sample(atoms, samples=20)
    for seed, sign in ((0, 1), (1, -1)):
        matrix = sign * rotation(seed)
        moved = rotated(atoms, matrix)
        moved.positions += [1.0, -2.0, 3.0]
        given = model.sample(moved, samples=20)
        torch.testing.assert_close(given.energy, expected.energy, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(given.forces, expected.forces @ torch.from_numpy(matrix).T, rtol=1e-11, atol=1e-12)
    assert float(expected.spread.forces.max()) > 1e-3


def test_loading_leaves_the_random_numbers_alone():
    pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
    before = torch.random.get_rng_state()
    pmlip.load_backbone("chgnet")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_unknown_backbone_is_refused():
    with pytest.raises(ValueError, match=r"unknown backbone 'gnome'; allowed: .*chgnet"):
        pmlip.load_backbone("gnome")


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "chgnet.model", None)
    monkeypatch.delitem(sys.modules, "pmlip.backbones.chgnet", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'pmlip\[chgnet\]'"):
        pmlip.load_backbone("chgnet")
    monkeypatch.delitem(sys.modules, "pmlip.backbones.chgnet", raising=False)


def test_every_adapter_file_is_found_by_its_name():
    assert "chgnet" in backbones.available()
    assert "base" not in backbones.available()


def test_the_hash_sees_values_and_names():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.load_state_dict(first.state_dict())
    assert weights_hash(first) == weights_hash(second)
    with torch.no_grad():
        second.bias[0] += 1e-6
    assert weights_hash(first) != weights_hash(second)
    assert weights_hash(torch.nn.Sequential(first)) != weights_hash(first)
