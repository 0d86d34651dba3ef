import warnings

import numpy as np
import pytest
import torch
from ase import units
from ase.build import bulk

import pmlip
from conftest import randomise_noise
from molecules import calibration

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch-sim is compiled in a way that torch gives up
    torch_sim = pytest.importorskip("torch_sim", reason="torch-sim is not installed")

from torch_sim.models.interface import validate_model_outputs

from pmlip.torchsim import TorchSimModel


@pytest.fixture(scope="module")
def model():
    return randomise_noise(pmlip.perturb(pmlip.load_backbone("chgnet")), scale=4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_it_is_what_torch_sim_expects(model):
    validate_model_outputs(TorchSimModel(model, samples=2), torch.device("cpu"), torch.float32)


def test_it_gives_what_the_calculator_gives(model):
    structures = [bulk("Si"), bulk("NaCl", "rocksalt", a=5.6)]
    for atoms in structures:
        atoms.rattle(0.05, seed=0)
    state = torch_sim.io.atoms_to_state(structures, torch.device("cpu"), torch.float64)
    outputs = TorchSimModel(model, samples=3, seed=1)(state)
    for index, atoms in enumerate(structures):
        atoms.calc = pmlip.PMLIPCalculator(model, samples=3, seed=1)
        own = state.system_idx == index
        np.testing.assert_allclose(outputs["energy"][index], atoms.get_potential_energy(), atol=1e-4)
        np.testing.assert_allclose(outputs["forces"][own], atoms.get_forces(), atol=1e-4)
        np.testing.assert_allclose(outputs["stress"][index], atoms.get_stress(voigt=False), atol=1e-5)
        spread = atoms.calc.results["forces_uncertainty"]
        np.testing.assert_allclose(outputs["forces_uncertainty"][own], spread, atol=1e-4)


def test_the_spread_of_the_energies_has_its_own_factor(model, monkeypatch):
    state = torch_sim.io.atoms_to_state([bulk("Si")], torch.device("cpu"), torch.float64)
    as_drawn = TorchSimModel(model, samples=2)(state)
    monkeypatch.setattr(model, "calibration", calibration(conformal=None, samples=2, energy_factor=0.25))
    scaled = TorchSimModel(model, samples=2)(state)
    torch.testing.assert_close(scaled["energy_uncertainty"], 0.25 * as_drawn["energy_uncertainty"])
    torch.testing.assert_close(scaled["forces_uncertainty"], as_drawn["forces_uncertainty"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_many_systems_move_at_once(model):
    """Ten steps of NVE for two crystals of different size; the energy stays."""
    structures = [bulk("Si"), bulk("Si").repeat((2, 1, 1))]
    wrapped = TorchSimModel(model, samples=2)
    start = torch_sim.io.atoms_to_state(structures, torch.device("cpu"), torch.float64)
    temperature, step = (torch.tensor(x, dtype=torch.float64) for x in (300 * units.kB, 1 * units.fs))
    begin, advance = torch_sim.integrators.nve(wrapped, dt=step, kT=temperature, seed=0)
    state = begin(start)

    def total(state):
        kinetic = 0.5 * (state.momenta.square() / state.masses[:, None]).sum(-1)
        return state.energy + torch.zeros(2, dtype=torch.float64).index_add(0, state.system_idx, kinetic)

    before = total(state)
    for _ in range(10):
        state = advance(state)
    assert float((total(state) - before).abs().max()) < 2e-3
    assert float((state.positions - start.positions).abs().max()) > 1e-3
