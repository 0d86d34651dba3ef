import copy

import ase.db
import numpy as np
import pytest
import torch
from ase import units
from ase.build import molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from ase.io import read, write
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.optimize import BFGS, FIRE

import pmlip
from conftest import randomise_noise
from molecules import WATER, calibration, molecules
from pmlip import methods
from pmlip.calculator import PMLIPCalculator, Recorder
from pmlip.provenance import History
from pmlip.structures.annotations import SPREADS_PER_ATOM, SPREADS_PER_STRUCTURE
from pmlip.structures.labels import fingerprint
from tiny import tiny_backbone


@pytest.fixture
def model():
    return randomise_noise(pmlip.perturb(tiny_backbone()))


def water(model, **options):
    atoms = WATER.copy()
    atoms.calc = PMLIPCalculator(model, **{"samples": 5, "seed": 3, **options})
    return atoms


def test_results_are_mean_and_spread_of_the_samples(model):
    atoms = water(model, ensembles=True)
    drawn, mean = model.sample_with_mean(WATER, samples=5, seed=3)
    results = (atoms.get_potential_energy(), atoms.calc.results)[1]
    np.testing.assert_allclose(results["energy"], mean.energy[0], atol=1e-9)
    np.testing.assert_allclose(results["energy_uncertainty"], drawn.energy[:, 0].std(), atol=1e-9)
    np.testing.assert_allclose(results["forces"], mean.forces, atol=1e-9)
    np.testing.assert_allclose(results["forces_uncertainty"], drawn.forces.std(0), atol=1e-9)
    np.testing.assert_allclose(results["forces_ensemble"], drawn.forces, atol=1e-9)
    np.testing.assert_allclose(results["energy_var"], results["energy_uncertainty"] ** 2, atol=1e-9)
    assert results["forces_comm"] is results["forces_ensemble"]
    assert results["max_atom_uncertainty"] == results["atom_uncertainty"].max()
    assert results["free_energy"] == results["energy"]


def test_another_charge_is_calculated_anew(model):
    atoms = water(model)
    atoms.get_potential_energy()
    assert not atoms.calc.check_state(atoms)
    atoms.info["charge"] = 1
    assert atoms.calc.check_state(atoms) == ["info"]
    atoms.get_potential_energy()
    assert not atoms.calc.check_state(atoms)
    assert fingerprint([atoms]) != fingerprint([WATER])


def test_the_prediction_without_noise_on_request(model):
    atoms = water(model, point="zero")
    np.testing.assert_allclose(atoms.get_forces(), model.predict(WATER).forces, atol=1e-9)
    np.testing.assert_allclose(
        atoms.calc.results["forces_uncertainty"], model.sample(WATER, samples=5, seed=3).spread.forces, atol=1e-9
    )


def test_the_uncertainty_of_an_atom_is_the_same_in_every_frame(model):
    atoms, turned = water(model), water(model)
    turned.rotate(70, (1, 2, 3))
    atoms.get_forces(), turned.get_forces()
    np.testing.assert_allclose(
        atoms.calc.results["atom_uncertainty"], turned.calc.results["atom_uncertainty"], atol=1e-9
    )
    assert not np.allclose(atoms.calc.results["forces_uncertainty"], turned.calc.results["forces_uncertainty"])


def test_what_is_not_there_is_not_promised(model):
    atoms = water(model)
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()
    with pytest.raises(PropertyNotImplementedError):
        atoms.calc.get_property("dipole", atoms)


def test_export_properties_holds_what_ase_knows(model):
    atoms = water(model)
    atoms.get_forces()
    known = {"energy", "free_energy", "forces"}
    assert set(atoms.calc.export_properties()) == {*known, "natoms"}
    assert set(atoms.calc.calculate_properties(atoms, ["energy"])) == {*known, "natoms"}


def test_members_are_ordinary_calculators_of_the_samples(model):
    atoms = water(model)
    drawn = model.sample(WATER, samples=5, seed=3)
    for k, calculator in enumerate(atoms.calc.members()):
        np.testing.assert_allclose(calculator.get_forces(WATER.copy()), drawn.forces[k], atol=1e-9)


def test_a_file_of_a_model_will_do(tmp_path):
    pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
    original = randomise_noise(pmlip.perturb(pmlip.load_backbone("chgnet")), scale=4)
    original.save(tmp_path / "model.pt")
    forces = [water(given).get_forces() for given in (original, tmp_path / "model.pt")]
    np.testing.assert_allclose(*forces, atol=1e-5)


def test_ensembles_have_members_and_row_noise_has_none():
    ensemble = methods.make("ensemble", tiny_backbone(), members=3)
    for number, part in enumerate(ensemble.parts()):
        with torch.no_grad():
            part.backbone.module.force.weight.mul_(1 + 0.1 * number)
    atoms = water(ensemble)
    assert atoms.calc.samples == 3
    assert atoms.get_forces().shape == (3, 3)
    assert len(atoms.calc.members()) == 3
    with pytest.raises(ValueError, match="numbered 0 to 2, got number=3"):
        ensemble.member(3)
    blip = water(methods.make("blip", tiny_backbone()))
    assert blip.get_forces().shape == (3, 3)
    with pytest.raises(ValueError, match="samples of blip cannot be exported: their noise is drawn per batch row"):
        blip.calc.members()


def test_an_interval_is_given_only_where_its_promise_holds(model):
    model.calibration = calibration(conformal=2.5, samples=5)

    def names(**options):
        atoms = water(model, **options)
        return (atoms.get_forces(), atoms.calc.results)[1]

    assert "forces_interval" in names()
    assert "forces_interval" not in names(samples=4)
    assert "forces_interval" not in names(point="zero")


def test_the_uncertainties_of_another_model_do_not_stay(model):
    model.calibration = calibration(conformal=2.5, samples=2)
    atoms = water(model)
    annotated = atoms.calc.annotate(atoms)
    assert "forces_interval" in annotated.arrays
    model.calibration = None
    annotated.calc = PMLIPCalculator(model, samples=5)
    assert "forces_interval" not in annotated.calc.annotate(annotated).arrays


@pytest.mark.parametrize("form", ["extxyz", "traj", "db"])
def test_uncertainties_survive_the_file(model, tmp_path, form):
    model.calibration = calibration(conformal=2.5, samples=2)
    atoms, path = water(model), tmp_path / f"md.{form}"
    record = Recorder(atoms, path)
    for _ in range(2):
        record()
        atoms.rattle(0.01)
    expected = water(model)
    expected.get_forces()
    sigma = (1 + 1 / 5) ** 0.5 * expected.calc.results["forces_uncertainty"]
    np.testing.assert_allclose(expected.calc.results["forces_interval"], 2.5 * sigma)
    if form == "db":
        row = next(ase.db.connect(path).select("max_atom_uncertainty>0"))
        found = {**row.key_value_pairs, **row.data}
        assert len(list(ase.db.connect(path).select())) == 2
    else:
        frames = read(path, ":")
        assert len(frames) == 2
        found = {**frames[0].info, **frames[0].arrays}
        np.testing.assert_allclose(frames[0].get_forces(), expected.get_forces(), atol=1e-7)
    for name in (*SPREADS_PER_ATOM, *SPREADS_PER_STRUCTURE):
        if name in expected.calc.results:
            np.testing.assert_allclose(found[name], expected.calc.results[name], atol=1e-7)


def test_an_annotated_structure_is_labelled_and_a_copy(model, tmp_path):
    atoms = water(model)
    carrier = atoms.calc.annotate(atoms)
    assert "atom_uncertainty" not in atoms.arrays
    write(tmp_path / "one.extxyz", carrier)
    read_back = read(tmp_path / "one.extxyz")
    np.testing.assert_allclose(pmlip.labels(read_back).forces, atoms.get_forces(), atol=1e-7)
    assert {"energy", "forces"} <= read_back.calc.results.keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: PMLIPCalculator(pmlip.perturb(tiny_backbone())), "was never trained"),
        (
            lambda model: PMLIPCalculator(methods.make("deterministic", tiny_backbone())),
            "predicts no spread, because it has a single sample; use a method with a spread",
        ),
        (lambda model: PMLIPCalculator(model, samples=1), "a spread needs at least 2 samples, got samples=1"),
        (lambda model: PMLIPCalculator(model, point="median"), "point must be one of mean, zero, got 'median'"),
        (lambda model: Recorder(WATER, "md.extxyz"), "atoms.calc must be a PMLIPCalculator, got NoneType"),
        (
            lambda model: Recorder(water(model), "md.pdb"),
            "path must end in one of .extxyz, .xyz, .traj, .db, got 'md.pdb'",
        ),
    ],
)
def test_bad_input_is_refused(model, make, message):
    with pytest.raises(ValueError, match=message):
        make(model)


@pytest.fixture(scope="module")
def quartz():
    """Real quartz, a little distorted, and a CHGNet whose samples differ by about 0.1 eV/Å."""
    pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
    from pmlip.datasets import silica_pbe

    model = randomise_noise(pmlip.perturb(pmlip.load_backbone("chgnet")), scale=4)
    atoms = max(silica_pbe("eos"), key=lambda atoms: atoms.info["strain"])
    atoms.rattle(0.02, seed=0)
    return atoms, model


def test_relaxation_with_a_cell_filter_and_a_constraint(quartz):
    structure, model = quartz
    atoms = structure.copy()
    atoms.set_constraint(FixAtoms([0]))
    fixed = atoms.get_scaled_positions()[0]
    atoms.calc = PMLIPCalculator(model, samples=2)
    assert BFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=0.25, steps=25)
    assert np.abs(atoms.get_forces()).max() < 0.25
    assert "stress_uncertainty" in atoms.calc.results
    assert not np.allclose(atoms.cell, structure.cell)
    np.testing.assert_allclose(atoms.get_scaled_positions()[0], fixed, atol=1e-6)


@pytest.mark.slow
def test_the_energy_is_conserved_by_the_mean_and_by_a_folded_sample(quartz):
    structure, model = quartz
    calculator = PMLIPCalculator(model, samples=2)
    for calc in (calculator, calculator.members()[0]):
        atoms = structure.copy()
        atoms.calc = calc
        thermalize_momenta(atoms, 300, rng=np.random.default_rng(0))
        dynamics = VelocityVerlet(atoms, 1 * units.fs)
        energies = []
        dynamics.attach(lambda atoms=atoms, energies=energies: energies.append(atoms.get_total_energy()))
        dynamics.run(40)
        kinetic = atoms.get_kinetic_energy()
        assert np.ptp(energies) < 0.02 * kinetic


def test_a_nudged_elastic_band(model):
    images = [water(model) for _ in range(4)]
    images[-1].positions[1:] = WATER.positions[[2, 1]]
    band = NEB(images, method="improvedtangent")
    band.interpolate(method="linear")
    before = band.get_forces()
    FIRE(band, logfile=None).run(fmax=0.01, steps=3)
    assert np.isfinite(before).all()
    assert not np.allclose(before, band.get_forces())


def with_novelty(name="deterministic"):
    """A model that knows its training set, and a structure unlike all of it."""
    data = molecules(60)
    made = methods.make(name, tiny_backbone())
    made.fit_novelty(data[:30], valid=data[30:])
    squeezed = data[0].copy()
    squeezed.positions *= 0.3
    return made, data[0].copy(), squeezed


def test_without_samples_one_pass_gives_forces_error_bars_and_novelty(monkeypatch):
    made, known, _ = with_novelty()
    passes = []
    monkeypatch.setattr(type(made.backbone), "forward", counted(type(made.backbone).forward, passes))
    known.calc = PMLIPCalculator(made, samples=0)
    forces = known.get_forces()
    assert len(passes) == 1
    found = made.novelty(known)
    np.testing.assert_allclose(forces, made.predict(known).forces)
    assert known.calc.results["novelty"] == pytest.approx(float(found.structure[0]))
    np.testing.assert_allclose(known.calc.results["atom_novelty"], found.atom)
    np.testing.assert_allclose(known.calc.results["forces_uncertainty"][:, 1], found.sigma)
    assert known.calc.members() == []


def counted(forward, passes):
    def run(self, graph):
        passes.append(graph)
        return forward(self, graph)

    return run


def test_a_structure_outside_the_training_set_is_said_once():
    made, known, squeezed = with_novelty()
    calculator = PMLIPCalculator(made, samples=0)
    known.calc = squeezed.calc = calculator
    known.get_forces()  # without a warning
    with pytest.warns(UserWarning, match=r"lies outside the training set: its novelty is .* most unusual atom is \d"):
        squeezed.get_forces()
    squeezed.rattle(0.001)
    squeezed.get_forces()  # warnings are errors here
    other = known.copy()
    other.symbols[1] = "N"
    other.calc = PMLIPCalculator(made, samples=0)
    with pytest.warns(UserWarning, match=r"atom 1 \(N\) has an element that the training set lacks"):
        other.get_forces()
    assert np.isinf(other.calc.results["novelty"])


def test_a_composition_outside_the_training_set_is_said_once(model):
    history = History(config={}, compositions=["H2O"])
    own = copy.copy(model)
    own.history = history
    inside, outside = molecule("H2O"), molecule("H2O2")
    inside.calc = outside.calc = PMLIPCalculator(own, samples=2)
    inside.get_forces()
    with pytest.warns(UserWarning, match=r"H2O2 is no combination of the compositions in the training set \(H2O\)"):
        outside.get_forces()
    outside.rattle(0.01)
    outside.get_forces()


def test_samples_come_with_novelty_where_the_training_set_is_known(tmp_path):
    made, known, _ = with_novelty("ensemble")
    with torch.no_grad():
        made.parts()[1].backbone.module.force.weight.mul_(1.1)
    known.calc = PMLIPCalculator(made)
    known.get_forces()
    assert 0 < known.calc.results["novelty"] < 1.5
    Recorder(known, tmp_path / "md.extxyz")()
    stored = read(tmp_path / "md.extxyz")
    assert stored.info["novelty"] == pytest.approx(known.calc.results["novelty"])
    np.testing.assert_allclose(stored.arrays["atom_novelty"], known.calc.results["atom_novelty"], rtol=1e-6)


def test_one_pass_needs_a_model_that_knows_its_training_set(model):
    with pytest.raises(ValueError, match=r"no training features, .* call model.fit_novelty .* or run pmlip novelty"):
        PMLIPCalculator(model, samples=0)
    with pytest.raises(ValueError, match="ensembles=True needs samples, got samples=0"):
        PMLIPCalculator(model, samples=0, ensembles=True)
