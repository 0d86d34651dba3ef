"""MACE: the true architecture at reduced width with random weights."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111

import pmlip
from contract import BackboneContract, pair_across, rotated, rotation

pytest.importorskip("mace", reason="backbone 'mace' is not installed")
from mace import modules  # before e3nn, which it makes readable for newer versions of torch

from conftest import randomise_noise
from pmlip.backbones import weights_hash
from pmlip.backbones.mace import MACEBackbone

from e3nn import o3  # isort: skip

REFERENCES = {1: -3.7, 6: -8.4, 7: -7.4, 8: -7.3, 11: -2.8, 14: -7.7, 17: -2.8, 29: -4.6}  # eV


def small(kind="ScaleShiftMACE", block="RealAgnosticResidualInteractionBlock", heads=None, variant="", **options):
    torch.manual_seed(0)
    copies = len(heads or ("Default",))
    if kind == "ScaleShiftMACE":
        options |= {"atomic_inter_scale": [0.8] * copies, "atomic_inter_shift": [0.1] * copies}
    module = getattr(modules, kind)(
        r_max=5.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=modules.interaction_classes[block],
        interaction_cls_first=modules.interaction_classes[block],
        num_interactions=2,
        num_elements=len(REFERENCES),
        hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        MLP_irreps=o3.Irreps("8x0e"),
        atomic_energies=np.array([list(REFERENCES.values())] * copies),
        avg_num_neighbors=10.0,
        atomic_numbers=list(REFERENCES),
        correlation=3,
        gate=torch.nn.functional.silu,
        radial_MLP=[32, 32],
        heads=heads,
        **options,
    )
    return MACEBackbone(module.eval(), variant)


class MACEContract(BackboneContract):
    calculator_needs_cell = False
    sites_have_bias = False
    cutoffs = (5.0,)

    @pytest.fixture(scope="class")
    @classmethod
    def weights(cls, backbone, tmp_path_factory):
        file = tmp_path_factory.mktemp("mace") / "small.model"
        backbone.save(file)
        return file

    @pytest.fixture(autouse=True)
    def _weights(self, weights):
        self.file = weights

    def load(self, path, backbone):
        return pmlip.load(path, weights=self.file, trust=True)


class TestDouble(MACEContract):
    """As MACE trains its models."""

    energy_tolerance = 1e-10
    force_tolerance = 1e-9

    @pytest.fixture(scope="class")
    @classmethod
    def backbone(cls):
        return small().double()


class TestSingle(MACEContract):
    @pytest.fixture(scope="class")
    @classmethod
    def backbone(cls):
        return small()


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("MACE", "RealAgnosticInteractionBlock"),
        ("ScaleShiftMACE", "RealAgnosticDensityResidualInteractionBlock"),
        ("ScaleShiftMACE", "RealAgnosticResidualNonLinearInteractionBlock"),
    ],
)
def test_other_kinds_agree_with_the_calculator_and_are_continuous(kind, block):
    """The last one has a radial MLP of plain linear layers, and the cutoff after it."""
    options = {"apply_cutoff": False} if "NonLinear" in block else {"pair_repulsion": True}
    backbone = small(kind, block, **options).double()
    model = randomise_noise(pmlip.perturb(backbone))
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=0)
    plain = pmlip.perturb(backbone).predict(atoms)
    atoms.calc = backbone.calculator()
    assert float(plain.energy) == pytest.approx(atoms.get_potential_energy(), abs=1e-9)
    np.testing.assert_allclose(plain.forces.numpy(), atoms.get_forces(), atol=1e-9)
    energy = model.sample([pair_across(5.0 + step) for step in (-1e-6, 1e-6)], samples=3).energy
    torch.testing.assert_close(energy[:, 0], energy[:, 1], rtol=0, atol=2e-6)
    assert float(model.sample(atoms, samples=3).spread.energy) > 1e-4


def test_sites_are_the_first_layers_of_all_radial_mlps():
    model = pmlip.perturb(small(), noise_dim=32)
    assert [site.name for site in model.sites] == [f"interactions.{i}.conv_tp_weights.layer0" for i in range(2)]
    assert {site.rows for site in model.sites} == {"edge"}
    assert sum(p.numel() for p in model.noise_parameters()) == 2 * 32 * 32 + 32 * 32


def test_forces_are_continuous_at_the_cutoff():
    model = randomise_noise(pmlip.perturb(small().double()))
    forces = model.sample([pair_across(5.0 + step) for step in (-1e-6, 1e-6)], samples=3).forces
    torch.testing.assert_close(forces[:, :3], forces[:, 3:], rtol=0, atol=1e-5)


def test_weights_in_a_local_file(tmp_path):
    backbone = small()
    backbone.shift_references({14: 0.5})
    backbone.save(tmp_path / "small.model")
    again = pmlip.load_backbone("mace", weights=tmp_path / "small.model", trust=True)
    assert weights_hash(again) == weights_hash(backbone)
    assert again.variant == "Default"
    with pytest.raises(FileNotFoundError, match="there is no weights file"):
        pmlip.load_backbone("mace", weights=tmp_path / "none.model", trust=True)
    torch.save({"state": {}}, tmp_path / "state.model")
    with pytest.raises(ValueError, match="holds a dict, not a whole MACE model"):
        pmlip.load_backbone("mace", weights=tmp_path / "state.model", trust=True)
    with pytest.raises(ValueError, match="includes no weights"):
        pmlip.load_backbone("mace")


def test_a_file_that_can_execute_code_is_refused_unless_trusted(tmp_path):
    class Harm:
        def __reduce__(self):
            return (tmp_path / "harm").mkdir, ()

    torch.save(Harm(), tmp_path / "harmful.model")
    with pytest.raises(ValueError, match=r"harmful.model is a MACE model, which is a pickle .* pass trust=True"):
        pmlip.load_backbone("mace", weights=tmp_path / "harmful.model")
    backbone = small()
    backbone.save(tmp_path / "small.model")
    pmlip.perturb(backbone).save(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="pass trust=True"):
        pmlip.load(tmp_path / "model.pt", weights=tmp_path / "small.model")
    assert not (tmp_path / "harm").exists()


def test_a_file_of_something_else_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "linear.model")
    with pytest.raises(ValueError, match=r"must be a plain MACE or ScaleShiftMACE, .* got a Linear"):
        pmlip.load_backbone("mace", weights=tmp_path / "linear.model", trust=True)


def test_a_sample_in_its_own_file_format(tmp_path):
    model = randomise_noise(pmlip.perturb(small()))
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=0)
    model.fold(sample=1).save(tmp_path / "sample.model")
    again = pmlip.load_backbone("mace", weights=tmp_path / "sample.model", trust=True)
    atoms.calc = again.calculator()
    expected = model.sample(atoms, samples=2).forces[1]
    np.testing.assert_allclose(atoms.get_forces(), expected.numpy(), atol=1e-5)


def test_heads_are_the_variants(tmp_path):
    two = small(heads=["pbe", "r2scan"], variant="r2scan")
    two.shift_references({14: 0.5})
    two.save(tmp_path / "two.model")
    energies = []
    for head in ("pbe", "r2scan"):
        backbone = pmlip.load_backbone(f"mace:{head}", weights=tmp_path / "two.model", trust=True)
        atoms = bulk("Si")
        atoms.calc = backbone.calculator()
        energies.append(float(pmlip.perturb(backbone).predict(atoms).energy))
        assert energies[-1] == pytest.approx(atoms.get_potential_energy(), abs=1e-4)
    assert energies[0] != energies[1]
    with pytest.raises(ValueError, match="this MACE has no head ''; ask for 'mace:pbe' or 'mace:r2scan'"):
        pmlip.load_backbone("mace", weights=tmp_path / "two.model", trust=True)


def test_unknown_elements_are_refused_by_name():
    with pytest.raises(ValueError, match=r"structure 1 \(Fe\): this MACE does not know Fe, only H, C, N, O"):
        pmlip.perturb(small()).predict([bulk("Si"), bulk("Fe")])


def test_periodic_axis_without_a_cell_vector_is_refused():
    with pytest.raises(ValueError, match="periodic along an axis without a cell vector"):
        pmlip.perturb(small()).predict(Atoms("H2", [[0, 0, 0], [0, 0, 0.7]], pbc=True))


def test_a_lone_atom_and_a_slab():
    """No edges at all, and two periodic axes in any direction."""
    model = pmlip.perturb(small().double())
    slab = fcc111("Cu", (1, 1, 3))
    outputs = model.predict([Atoms("Si"), slab, rotated(slab, rotation())])
    assert not outputs.forces[0].any()
    torch.testing.assert_close(outputs.energy[1], outputs.energy[2], rtol=0, atol=1e-6)
    turned = outputs.forces[1:4] @ torch.from_numpy(rotation()).T
    torch.testing.assert_close(outputs.forces[4:], turned, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.predict(Atoms("Si")).energy[0], outputs.energy[0], rtol=0, atol=1e-8)
