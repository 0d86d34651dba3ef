"""Orb: the true architectures at reduced width with random weights, and the real Orb-v2 where it is at hand."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

import pmlip
from contract import BackboneContract

pytest.importorskip("orb_models", reason="backbone 'orb' is not installed")
from orb_models.forcefield import pretrained
from orb_models.forcefield.atomic_system import SystemConfig
from orb_models.forcefield.gns import AttentionInteractionNetwork

from pmlip.backbones.orb import OrbBackbone, SplitInteraction, variants
from pmlip.noise.layer_classes import become
from small_orb import WIDTHS, small


class RandomOrb(BackboneContract):
    calculator_needs_cell = False

    def load(self, path, backbone):
        return pmlip.load(path, backbone=backbone)  # random weights have no name


class TestDirect(RandomOrb):
    noise_scale = 0.1
    cutoffs = (6.0,)

    @pytest.fixture(scope="class")
    @classmethod
    def backbone(cls):
        return small("direct")


class TestConservative(RandomOrb):
    noise_scale = 0.1
    cutoffs = (6.0,)

    @pytest.fixture(scope="class")
    @classmethod
    def backbone(cls):
        return small("conservative")


class TestOrbV2(BackboneContract):
    """The real weights. At most 20 neighbours count, so there is no distance at which the graph changes."""

    calculator_needs_cell = False
    noise_scale = 0.1
    energy_tolerance = 5e-6
    cutoffs = ()

    @pytest.fixture(scope="class")
    @classmethod
    def weights(cls, shared):
        return shared / "weights" / "orb-d3-xs-v2-20241011.ckpt"

    @pytest.fixture(scope="class")
    @classmethod
    def backbone(cls, weights):
        return pmlip.load_backbone("orb:orb_d3_xs_v2", weights=weights)

    @pytest.fixture(autouse=True)
    def _weights(self, weights):
        self.file = weights

    def load(self, path, backbone):
        return pmlip.load(path, weights=self.file)

    def test_forces_of_real_zeolites_are_near_their_dft_labels(self, backbone, shared):
        data = np.load(shared / "data" / "zeo22" / "edi.npz")
        structures = [
            Atoms(data["symbols"], positions, cell=cell, pbc=True)
            for positions, cell in zip(data["positions"][::400], data["cells"][::400], strict=True)
        ]
        forces = pmlip.perturb(backbone).predict(structures).forces.reshape(len(structures), -1, 3)
        assert np.abs(forces.numpy() - data["forces"][::400]).mean() < 0.1  # zero-shot; 0.0645 on the whole set


def test_sites_are_the_first_layers_of_all_message_and_update_mlps():
    model = pmlip.perturb(small("direct"), noise_dim=32)
    assert len(model.sites) == 6
    assert {site.rows for site in model.sites} == {"node", "edge"}
    assert sum(p.numel() for p in model.noise_parameters()) == 6 * 64 * 32 + 32 * 32


@pytest.mark.parametrize("kind", ["direct", "conservative"])
def test_layers_that_work_in_parts_give_what_those_of_the_package_give(kind):
    backbone = small(kind)
    pristine = copy.deepcopy(backbone)
    for layer in pristine.module.model.gnn_stacks:
        assert type(layer) is SplitInteraction
        become(layer, AttentionInteractionNetwork)
    atoms = bulk("Si", cubic=True)
    atoms.rattle(0.1, seed=0)
    ours, theirs = (given.double()(given.double().graph([atoms])) for given in (backbone, pristine))
    torch.testing.assert_close(ours["energy"], theirs["energy"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours["forces"], theirs["forces"], rtol=1e-9, atol=1e-9)


def test_every_variant_of_the_package_is_known_by_its_own_name():
    assert {"orb-v3-direct-20-omat", "orb-v3-conservative-inf-mpa", "orb-v3-direct-omol", "orb-v2"} <= set(variants())
    assert "orb-v1" not in variants()  # the package itself refuses these
    with pytest.raises(ValueError, match=r"unknown Orb 'orb-v4'; allowed: orb-v3-conservative-omol, "):
        pmlip.load_backbone("orb:orb_v4")


def test_weights_in_a_local_file(tmp_path, monkeypatch):
    """Loading as it is for the real ones, with an architecture that is small."""
    import orb_models.forcefield.pretrained as package

    backbone = small("direct")
    backbone.save(tmp_path / "small.ckpt")
    architecture = package.orb_v3_direct_architecture
    monkeypatch.setattr(package, "orb_v3_direct_architecture", lambda **given: architecture(**WIDTHS, **given))
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    again = pmlip.load_backbone("orb:orb_v3_direct_inf_omat", weights=tmp_path / "small.ckpt")
    assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == (dtype, precision)
    for name, value in again.state_dict().items():
        assert torch.equal(value, backbone.state_dict()[name])
    assert all(p.requires_grad for p in again.module.model.parameters())
    with pytest.raises(FileNotFoundError, match="there is no weights file"):
        pmlip.load_backbone("orb:orb_v3_direct_inf_omat", weights=tmp_path / "none.ckpt")
    (tmp_path / "other.ckpt").write_bytes(b"something else")
    torch.save({"weights": Path("objects that are no tensors")}, tmp_path / "objects.ckpt")
    for name in ("other.ckpt", "objects.ckpt"):
        with pytest.raises(ValueError, match=rf"{name} does not hold the weights of orb-v3-direct-inf-omat") as found:
            pmlip.load_backbone("orb:orb_v3_direct_inf_omat", weights=tmp_path / name)
        assert "weights_only" not in str(found.value)  # the advice of torch to load the file unsafely
        assert "you trust" not in str(found.value)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^[^\n]*small.ckpt does not hold the weights of [^\n]*size mismatch[^\n]*$"):
        pmlip.load_backbone("orb:orb_v3_direct_inf_omat", weights=tmp_path / "small.ckpt")


def test_a_download_that_fails_says_what_to_do(monkeypatch):
    import orb_models.forcefield.pretrained as package

    def refuse(*_):
        raise OSError("no network")

    monkeypatch.setattr(package, "cached_path", refuse)
    with pytest.raises(ConnectionError, match=r"could not be downloaded .* fetch https://.*ckpt .* weights=PATH"):
        pmlip.load_backbone("orb:orb-v3-direct-20-omat")


def test_charge_and_spin_are_asked_for_where_they_are_needed():
    model = pmlip.perturb(small("direct", has_charge_spin_cond=True, has_stress=False))
    water = Atoms("OH2", [[0, 0, 0], [0, 0.76, 0.59], [0, -0.76, 0.59]])
    with pytest.raises(ValueError, match=r"structure 0 \(H2O\): .* needs its charge; set atoms.info\['charge'\]"):
        model.predict(water)
    energies = []
    for charge in (0, 1):
        water.info = {"charge": charge, "spin": 1}
        energies.append(float(model.predict(water).energy))
    assert energies[0] != energies[1]


def test_net_force_of_every_sample_is_zero():
    from conftest import randomise_noise

    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=0)
    forces = randomise_noise(pmlip.perturb(small("direct")), scale=0.1).sample(atoms, samples=3).forces
    torch.testing.assert_close(forces.sum(1), torch.zeros(3, 3), rtol=0, atol=1e-5)


def test_partly_periodic_structures_are_refused():
    slab = bulk("Cu", cubic=True)
    slab.pbc = [True, True, False]
    with pytest.raises(ValueError, match=r"periodic along all axes or none, got pbc=\[True, True, False\]"):
        pmlip.perturb(small("direct")).predict(slab)


def test_elements_beyond_the_embedding_are_refused():
    with pytest.raises(ValueError, match="Orb does not know Og"):
        pmlip.perturb(small("direct")).predict(Atoms("Og"))


@pytest.mark.slow
def test_a_compiled_orb_keeps_its_noise():
    """Injected first, compiled then: the compiled model gives the samples of the plain one."""
    from conftest import randomise_noise

    model = randomise_noise(pmlip.perturb(small("direct")), scale=0.1)
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=0)
    plain = [model.sample(atoms, samples=2, seed=seed) for seed in (0, 1)]
    model.backbone.module.compile(mode="default", dynamic=True)
    for seed in (0, 1):
        compiled = model.sample(atoms, samples=2, seed=seed)
        torch.testing.assert_close(compiled.forces, plain[seed].forces, rtol=0, atol=2e-5)


def test_the_confidence_head_becomes_a_spread():
    """Expected errors lie within the head's bins, and the width on each atom is proportional to them."""
    from pmlip import methods
    from pmlip.datasets import silica_pbe
    from pmlip.training.config import FinetuneConfig
    from pmlip.training.finetuning import finetune

    data = silica_pbe("train")[:6]
    backbone = small("direct")
    errors = backbone.expected_errors(backbone.graph(data))
    assert len(errors) == sum(map(len, data))
    assert 0 < float(errors.min()) <= float(errors.max()) < 0.3
    method = methods.make("confidence", backbone)
    finetune(method, data[:4], valid=data[4:], config=FinetuneConfig(epochs=1, validations=1))
    spread = method.sample(data[5], samples=400).spread.forces.mean(-1)
    expected = method.backbone.expected_errors(method.backbone.graph([data[5]]))
    torch.testing.assert_close(spread / spread.mean(), (expected / expected.mean()).float(), rtol=0.15, atol=0)
    older = OrbBackbone(pretrained.orb_v2_architecture(1, "cpu", SystemConfig(radius=6.0, max_num_neighbors=20)), "v2")
    with pytest.raises(ValueError, match="v2 has no confidence head; only Orb-v3 has one"):
        methods.make("confidence", older)
