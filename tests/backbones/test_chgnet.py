"""CHGNet with the weights in its wheel."""

import math

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111

import pmlip
from contract import BackboneContract
from pmlip.methods._response import of_layers

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
from chgnet.model import CHGNet
from chgnet.model.dynamics import CHGNetCalculator
from chgnet.model.layers import AtomConv

from pmlip.backbones.chgnet import CHGNetBackbone, SplitAtomConv
from pmlip.structures.atoms import StructureError


@pytest.fixture(scope="class")
def backbone():
    return pmlip.load_backbone("chgnet")


class TestContract(BackboneContract):
    noise_scale = 0.1
    cutoffs = (3.0, 6.0)


def test_sites_are_the_first_layers_of_all_message_mlps(backbone):
    model = pmlip.perturb(backbone, noise_dim=32)
    assert len(model.sites) == 20  # 4 atom, 3 bond and 3 angle layers, each with a core and a gate
    assert {site.rows for site in model.sites} == {"edge", "angle"}
    assert sum(p.numel() for p in model.noise_parameters()) == 20 * 64 * 32 + 32 * 32


def test_layers_that_work_in_parts_give_what_those_of_the_package_give(backbone):
    pristine = CHGNetCalculator(CHGNet.load(use_device="cpu", verbose=False), use_device="cpu")
    assert type(backbone.module.atom_conv_layers[0]) is SplitAtomConv
    assert type(pristine.model.atom_conv_layers[0]) is AtomConv
    for atoms in (*pmlip.datasets.silica_pbe("train")[:2], bulk("Cu", cubic=True)):
        given = atoms.copy()
        given.rattle(0.1, seed=0)
        ours = pmlip.perturb(backbone).predict(given)
        given.calc = pristine
        assert float(ours.energy) == pytest.approx(given.get_potential_energy(), abs=1e-5 * len(given))
        np.testing.assert_allclose(ours.forces, given.get_forces(), atol=2e-4)
        np.testing.assert_allclose(ours.stress[0], given.get_stress(), atol=1e-5)


@pytest.mark.usefixtures("two_threads")
def test_the_same_structure_gives_the_very_same_numbers_again(backbone):
    """Also where several threads add to the gradient of one cell."""
    graph = backbone.graph([pmlip.datasets.silica_pbe("train")[0].repeat((3, 2, 2))])
    with torch.no_grad():
        first, *others = (backbone(graph) for _ in range(4))
    assert all(torch.equal(other[name], value) for other in others for name, value in first.items())


def test_layers_of_another_kind_are_left_as_they_are():
    for options in ({"conv_dropout": 0.1}, {"conv_norm": "layer"}):
        other = CHGNetBackbone(CHGNet(**options), "0.3.0")
        assert type(other.module.atom_conv_layers[0]) is AtomConv


def test_cells_of_one_atom_do_not_blow_up_the_start(backbone):
    """Alone in its cell an atom feels no force, so no noise would seem to be enough."""
    model = pmlip.perturb(backbone, noise_dim=8)
    alone, four = (math.hypot(*of_layers(model, [bulk("Cu", cubic=cubic)])) for cubic in (False, True))
    assert 0.2 < alone / four < 5


@pytest.mark.parametrize(
    ("options", "count"),
    [({"update_bond": False}, 14), ({"update_angle": False}, 14), ({"angle_layer_hidden_dim": 16}, 20), ({}, 20)],
)
def test_chgnets_of_other_forms_have_their_sites(options, count):
    other = CHGNetBackbone(CHGNet(**options), "0.3.0")
    assert len(pmlip.perturb(other, noise_dim=4).sites) == count
    assert len(other.mlps()) == count


def test_a_sample_in_its_own_file_format(backbone, tmp_path):
    model = pmlip.perturb(backbone)
    model.fold(sample=0).save(tmp_path / "sample.pth.tar")
    assert CHGNet.from_file(str(tmp_path / "sample.pth.tar")).state_dict().keys() == backbone.module.state_dict().keys()
    again = pmlip.load_backbone("chgnet", weights=tmp_path / "sample.pth.tar")
    assert torch.equal(again.module.mlp.layers[0].weight, backbone.module.mlp.layers[0].weight)


def test_forces_of_real_zeolites_are_near_their_dft_labels(backbone, shared):
    data = np.load(shared / "data" / "zeo22" / "edi.npz")
    structures = [
        Atoms(data["symbols"], positions, cell=cell, pbc=True)
        for positions, cell in zip(data["positions"][::400], data["cells"][::400], strict=True)
    ]
    forces = pmlip.perturb(backbone).predict(structures).forces.reshape(len(structures), -1, 3)
    error = np.abs(forces.numpy() - data["forces"][::400]).mean()
    assert error < 0.3 * np.abs(data["forces"][::400]).mean()


def test_isolated_atoms_are_refused_by_name(backbone):
    lonely = Atoms("SiO", [[0, 0, 0], [9, 0, 0]], cell=[30, 30, 30], pbc=True)
    with pytest.raises(ValueError, match=r"structure 1 \(OSi\): atom 0 \(Si\) has no neighbour within 6"):
        pmlip.perturb(backbone).predict([bulk("Si"), lonely])


def test_unknown_elements_are_refused_by_name(backbone):
    with pytest.raises(ValueError, match="does not know Cm"):
        pmlip.perturb(backbone).predict(bulk("Cm", "fcc", a=5))


def test_periodic_axis_without_a_cell_vector_is_refused(backbone):
    with pytest.raises(ValueError, match="periodic along an axis without a cell vector"):
        pmlip.perturb(backbone).predict(Atoms("H2", [[0, 0, 0], [0, 0, 0.7]], pbc=True))


def test_a_structure_without_a_graph_is_named_and_not_written(backbone, tmp_path, monkeypatch):
    """The package writes the structure to bond_graph_error.cif in the working directory."""
    monkeypatch.chdir(tmp_path)
    far = Atoms("OH2", [[0, 0, 0], [0, 0.76, 0.59], [0, -0.76, 0.59]])
    far.positions += 1e9  # rounding leaves few different positions
    with pytest.raises(StructureError, match=r"structure 3 \(H2O\): CHGNet cannot build its graph"):
        backbone.single(far, 3)
    assert not list(tmp_path.iterdir())


def test_a_slab_may_have_no_third_cell_vector(backbone):
    slab = fcc111("Cu", (1, 1, 3))
    boxed = slab.copy()
    boxed.center(vacuum=20, axis=2)
    model = pmlip.perturb(backbone)
    given, expected = model.predict(slab), model.predict(boxed)
    torch.testing.assert_close(given.energy, expected.energy, rtol=0, atol=1e-5)
    torch.testing.assert_close(given.forces, expected.forces, rtol=0, atol=1e-4)


def test_the_variant_whose_samples_would_depend_on_their_batch_is_refused():
    with pytest.raises(ValueError, match=r"use 0\.3\.0 or later"):
        CHGNetBackbone(CHGNet.load(model_name="0.2.0", use_device="cpu", verbose=False), "0.2.0")


def test_unknown_variant_is_refused():
    with pytest.raises(ValueError, match=r"allowed: 0.3.0, r2scan"):
        pmlip.load_backbone("chgnet:0.9")


def test_a_file_that_is_no_checkpoint_of_chgnet_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not weights")
    torch.save({"state": {}}, tmp_path / "other.pt")
    for name in ("notes.txt", "other.pt"):
        with pytest.raises(ValueError, match=f"{name} is not a checkpoint of CHGNet") as found:
            pmlip.load_backbone("chgnet", weights=tmp_path / name)
        assert found.value.__suppress_context__  # a traceback does not show torch's advice to load the file unsafely
    with pytest.raises(FileNotFoundError, match="there is no weights file"):
        pmlip.load_backbone("chgnet", weights=tmp_path / "none.pt")
