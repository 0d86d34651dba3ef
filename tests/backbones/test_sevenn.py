"""SevenNet with the weights in its wheel."""

import copy

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111

import pmlip
from contract import BackboneContract, pair_across, rotated, rotation

pytest.importorskip("sevenn", reason="backbone 'sevenn' is not installed")
from sevenn.calculator import SevenNetCalculator
from sevenn.util import load_checkpoint

from conftest import randomise_noise
from pmlip.backbones import weights_hash
from pmlip.backbones.sevenn import VARIANTS


@pytest.fixture(scope="module")
def backbone():
    return pmlip.load_backbone("sevenn")


class TestContract(BackboneContract):
    calculator_needs_cell = False
    sites_have_bias = False
    cutoffs = (5.0,)


def test_sites_are_the_first_layers_of_all_radial_mlps(backbone):
    model = pmlip.perturb(backbone, noise_dim=32)
    assert [site.name for site in model.sites] == [f"{i}_convolution.weight_nn.layer0" for i in range(5)]
    assert {site.rows for site in model.sites} == {"edge"}
    assert sum(p.numel() for p in model.noise_parameters()) == 5 * 64 * 32 + 32 * 32


def test_each_sample_is_equivariant_to_double_precision(backbone, record_property):
    model = randomise_noise(pmlip.perturb(backbone)).double()
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=0)
    expected = model.sample(atoms, samples=3)
    matrix = rotation(1)
    given = model.sample(rotated(atoms, matrix), samples=3)
    error = (given.forces - expected.forces @ torch.from_numpy(matrix).T).abs().max()
    record_property("rotation_error_double", float(error))
    # the constants of the spherical harmonics' couplings were rounded to single precision when they were made
    assert error < 1e-6
    assert float(expected.spread.forces.max()) > 1e-3


def test_forces_are_continuous_at_the_cutoff(backbone):
    model = randomise_noise(pmlip.perturb(backbone)).double()
    forces = model.sample([pair_across(5.0 + step) for step in (-1e-6, 1e-6)], samples=3).forces
    torch.testing.assert_close(forces[:, :3], forces[:, 3:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["7net-0_22may2024", "7net-l3i5", "7net-mf-0:PBE", "7net-mf-0:R2SCAN"])
def test_every_checkpoint_of_the_wheel(variant):
    name, _, modal = variant.partition(":")
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=0)
    outputs = pmlip.perturb(pmlip.load_backbone(f"sevenn:{variant}")).predict([atoms, bulk("Si")])
    with pytest.warns(UserWarning, match="No tensor product accelerator"):
        atoms.calc = SevenNetCalculator(name, device="cpu", modal=modal or None)
    assert float(outputs.energy[0]) == pytest.approx(atoms.get_potential_energy(), abs=1e-5)
    np.testing.assert_allclose(outputs.forces[:8].numpy(), atoms.get_forces(), atol=1e-5)


def test_references_of_a_model_of_several_labels_shift_alike():
    plain = pmlip.load_backbone("sevenn:7net-mf-0:R2SCAN")
    shifted = copy.deepcopy(plain)
    shifted.shift_references({14: 0.5})
    energy = [float(pmlip.perturb(backbone).predict(bulk("Si")).energy) for backbone in (plain, shifted)]
    assert energy[1] - energy[0] == pytest.approx(1.0, abs=1e-5)


def test_unknown_variants_are_refused():
    with pytest.raises(ValueError, match=f"unknown SevenNet '7net-9'; allowed: {', '.join(VARIANTS)}"):
        pmlip.load_backbone("sevenn:7net-9")
    with pytest.raises(ValueError, match=r"ask for 'sevenn:7net-mf-0:R2SCAN' or 'sevenn:7net-mf-0:PBE'"):
        pmlip.load_backbone("sevenn:7net-mf-0")
    with pytest.raises(ValueError, match="ask for 'sevenn:7net-0'"):
        pmlip.load_backbone("sevenn:7net-0:PBE")


def test_weights_in_a_local_file(backbone, tmp_path):
    changed = copy.deepcopy(backbone)
    changed.shift_references({14: 0.5})
    changed.save(tmp_path / "changed.pth")
    again = pmlip.load_backbone("sevenn", weights=tmp_path / "changed.pth")
    own = load_checkpoint(tmp_path / "changed.pth").build_model()  # as SevenNet itself reads it
    assert weights_hash(again) == weights_hash(changed)
    for name, value in own.state_dict().items():
        assert torch.equal(value, changed.module.state_dict()[name])
    randomise_noise(pmlip.perturb(changed)).save(tmp_path / "model.pt")
    assert pmlip.load(tmp_path / "model.pt", weights=tmp_path / "changed.pth").trained
    with pytest.raises(
        ValueError, match=r"made from sevenn:7net-0 with weights .*; pass the file of the original weights"
    ):
        pmlip.load(tmp_path / "model.pt")
    with pytest.raises(FileNotFoundError, match="there is no weights file"):
        pmlip.load_backbone("sevenn", weights=tmp_path / "none.pth")


def test_a_file_that_would_execute_code_is_refused(tmp_path):
    class Harm:
        def __reduce__(self):
            return (tmp_path / "harm").mkdir, ()

    torch.save({"config": Harm(), "model_state_dict": {}}, tmp_path / "harmful.pth")
    (tmp_path / "other.pth").write_bytes(b"something else")
    torch.save({"weights": torch.ones(1)}, tmp_path / "weights.pth")
    for name in ("harmful", "other", "weights"):
        with pytest.raises(ValueError, match=rf"{name}.pth is not a checkpoint of SevenNet, or"):
            pmlip.load_backbone("sevenn", weights=tmp_path / f"{name}.pth")
    assert not (tmp_path / "harm").exists()


def test_a_folded_sample_does_not_fit_into_its_file_format(backbone, tmp_path):
    with pytest.raises(ValueError, match="cannot hold a folded sample"):
        randomise_noise(pmlip.perturb(backbone)).fold(sample=0).save(tmp_path / "sample.pth")


def test_forces_of_real_zeolites_are_near_their_dft_labels(backbone, shared):
    data = np.load(shared / "data" / "zeo22" / "edi.npz")
    structures = [
        Atoms(data["symbols"], positions, cell=cell, pbc=True)
        for positions, cell in zip(data["positions"][::400], data["cells"][::400], strict=True)
    ]
    forces = pmlip.perturb(backbone).predict(structures).forces.reshape(len(structures), -1, 3)
    assert np.abs(forces.numpy() - data["forces"][::400]).mean() < 0.1


def test_unknown_elements_are_refused_by_name(backbone):
    with pytest.raises(ValueError, match=r"structure 1 \(Cm\): 7net-0 does not know Cm"):
        pmlip.perturb(backbone).predict([bulk("Si"), bulk("Cm", "fcc", a=5)])


def test_periodic_axis_without_a_cell_vector_is_refused(backbone):
    with pytest.raises(ValueError, match="periodic along an axis without a cell vector"):
        pmlip.perturb(backbone).predict(Atoms("H2", [[0, 0, 0], [0, 0, 0.7]], pbc=True))


def test_a_lone_atom_and_a_slab(backbone):
    """No edges at all, and two periodic axes in any direction."""
    slab = fcc111("Cu", (1, 1, 3))
    outputs = pmlip.perturb(backbone).predict([Atoms("Si"), slab, rotated(slab, rotation())])
    assert not outputs.forces[0].any()
    torch.testing.assert_close(outputs.energy[1], outputs.energy[2], rtol=0, atol=1e-5)
    turned = outputs.forces[1:4] @ torch.from_numpy(rotation()).float().T
    torch.testing.assert_close(outputs.forces[4:], turned, rtol=0, atol=1e-4)
    alone = pmlip.perturb(backbone).predict(Atoms("Si"))
    # rounding depends on the size of the batch, and how much it does depends on the processor
    torch.testing.assert_close(alone.energy[0], outputs.energy[0], rtol=0, atol=1e-5)
