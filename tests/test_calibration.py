from dataclasses import asdict

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import pmlip
from conftest import randomise_noise
from pmlip import methods
from pmlip.calibration import calibrate
from pmlip.provenance import Calibration, History
from pmlip.scores import fair_crps
from pmlip.spread_fit import best_factor, conformal_factor
from pmlip.training.config import FinetuneConfig
from pmlip.training.finetuning import finetune
from tiny import tiny_backbone


@pytest.mark.parametrize("width", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("count", [3, 8, 32])
def test_the_best_factor_undoes_a_wrong_width_at_every_k(width, count):
    generator = torch.Generator().manual_seed(0)
    samples = width * torch.randn(count, 20000, generator=generator, dtype=torch.float64)
    target = torch.randn(20000, generator=generator, dtype=torch.float64)
    assert best_factor(samples, target) == pytest.approx(1 / width, rel=0.03)
    with pytest.raises(ValueError, match="at least 3 samples are needed, got samples=2"):
        best_factor(samples[:2], target)


def test_conformal_intervals_cover_new_structures_as_promised():
    """Errors that are shared within a structure, and structures of different size."""
    random = np.random.default_rng(0)

    def structure():
        size = random.integers(1, 30)
        return np.abs(random.standard_t(3) + 0.3 * random.normal(size=size)) * random.uniform(0.5, 2)

    covered = []
    for _ in range(2000):
        known = [structure() for _ in range(24)]
        system = np.repeat(np.arange(24), [len(scores) for scores in known])
        factor = conformal_factor(np.concatenate(known), system, level=0.8)
        covered.append((structure() <= factor).mean())
    assert 0.79 < np.mean(covered) < 0.87


def test_a_level_needs_enough_structures():
    scores = np.arange(19.0)
    assert conformal_factor(scores, np.arange(19), level=0.95) == 18  # the largest of 19: exactly 19 / 20
    assert conformal_factor(scores[:18], np.arange(18), level=0.95) is None
    with pytest.raises(ValueError, match=r"level must lie between 0 and 1, got level=1\.5"):
        conformal_factor(scores, np.arange(19), level=1.5)


def labelled_by_its_own_samples(model, count=100):
    """Each structure labelled by another sample, so that the model is calibrated for them."""
    structures = []
    for index in range(count):
        atoms = Atoms("OHOH", [[0, 0, 0], [1, 0, 0], [0, 1.5, 0], [0, 1.5, 1]])
        atoms.positions += np.random.default_rng(index).normal(scale=0.1, size=(4, 3))
        drawn = model.sample(atoms, samples=1, seed=1000 + index)
        atoms.calc = SinglePointCalculator(atoms, energy=float(drawn.energy[0, 0]), forces=drawn.forces[0].numpy())
        structures.append(atoms)
    return structures


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_calibration_finds_the_noise_that_made_the_labels(factor, tmp_path):
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.1)
    structures = labelled_by_its_own_samples(model)
    point = model.predict(structures).forces
    model.scale_spread(1 / factor)
    found = calibrate(model, structures, samples=200)
    assert found.factor == pytest.approx(factor, rel=0.15)
    assert found.crps[1] < found.crps[0]
    assert abs(np.log(found.ssr[1])) < abs(np.log(found.ssr[0]))
    assert 1 < found.conformal < 5
    torch.testing.assert_close(model.predict(structures).forces, point)
    # samples of the scaled model are still potentials, and its file holds the scale
    again = (model.save(tmp_path / "scaled.pt"), pmlip.load(tmp_path / "scaled.pt", backbone=tiny_backbone()))[1]
    expected = model.sample(structures[0], samples=3).forces
    torch.testing.assert_close(again.sample(structures[0], samples=3).forces, expected)
    atoms = structures[0].copy()
    np.testing.assert_allclose(model.member(2).calculator().get_forces(atoms), expected[2], atol=1e-9)


@pytest.mark.parametrize("times", [2, 4, 8])
def test_a_factor_that_makes_it_worse_is_not_kept(times):
    """Where the response is curved a wide spread has another mean, so that errors much larger than the spread ask for
    more and more of it."""
    model = pmlip.perturb(tiny_backbone(seed=1), noise_dim=8)
    model.randomise(0.1, seed=1)
    structures, random = labelled_by_its_own_samples(model, 16), np.random.default_rng(0)
    drawn = model.sample(structures, samples=16)
    width = times * float(drawn.spread.forces.square().mean().sqrt())
    for index, atoms in enumerate(structures):
        mean = drawn.mean.forces[drawn.system == index].numpy()
        atoms.calc.results["forces"] = mean + width * random.normal(size=mean.shape)
    found = calibrate(model, structures)
    assert found.factor > 1
    assert found.crps[1] < found.crps[0]
    # the model is what was found, not what was tried last
    scored = fair_crps(model.sample(structures, samples=16).forces.double(), pmlip.labels(structures).forces).mean()
    assert float(scored) == pytest.approx(found.crps[1])


def test_a_calibration_that_is_refused_leaves_the_last_one():
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.1)
    structures = labelled_by_its_own_samples(model, 25)
    calibrate(model, structures, level=0.9)
    record = model.calibration
    with pytest.raises(ValueError, match="at least 3 samples are needed, got samples=2"):
        calibrate(model, structures, samples=2)
    crystal = Atoms("Cu", cell=[2.5, 2.5, 2.5], pbc=True)
    crystal.calc = SinglePointCalculator(crystal, energy=-3.0, forces=np.zeros((1, 3)))
    with pytest.raises(ValueError, match="symmetry fixes all forces"):
        calibrate(model, [crystal])
    assert model.calibration == record


def test_the_record_of_a_calibration_goes_when_the_spread_changes():
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.1)
    structures = labelled_by_its_own_samples(model, 25)
    found = calibrate(model, structures, level=0.9)
    assert model.calibration.conformal_for(16) == found.conformal > 0
    assert model.calibration.conformal_for(15) is None  # noisier than the spread it was fitted to
    model.scale_spread(2.0)
    assert model.calibration is None
    calibrate(model, structures, level=0.9)
    finetune(model, structures[:4], config=FinetuneConfig(epochs=1, samples=2, offsets=False))
    assert model.calibration is None


@pytest.mark.parametrize("name", ["p", "p-ensemble"])
def test_the_mean_of_the_energies_stays_where_it_was(name):
    """The response of energies to noise is curved, so that a smaller noise would move them all."""
    model = methods.make(name, tiny_backbone())
    for number, part in enumerate(model.learner().parts()):
        randomise_noise(part, scale=0.3, seed=number)
    structures = labelled_by_its_own_samples(model, 20)
    model.scale_spread(2.0)
    before = model.sample_with_mean(structures, samples=16)[1]
    found = calibrate(model, structures)
    after = model.sample_with_mean(structures, samples=16)[1]
    assert found.factor < 0.9
    moved = ((after.energy - before.energy) / before.atoms_per_system).mean()
    assert abs(float(moved)) < 1e-6


def test_what_cannot_be_calibrated_is_refused():
    model = pmlip.perturb(tiny_backbone())
    structures = labelled_by_its_own_samples(model, 2)
    with pytest.raises(ValueError, match="was never trained"):
        calibrate(model, structures)
    randomise_noise(model)
    del structures[1].calc.results["forces"]
    with pytest.raises(ValueError, match=r"structure 1 .*it has no forces"):
        calibrate(model, structures)
    blip = methods.make("blip", tiny_backbone())
    with pytest.raises(ValueError, match="the spread of blip cannot be scaled after training"):
        calibrate(blip, structures[:1])
    crystal = Atoms("Cu", cell=[2.5, 2.5, 2.5], pbc=True)
    crystal.calc = SinglePointCalculator(crystal, energy=-3.0, forces=np.zeros((1, 3)))
    width = model.noise.w_z.clone()
    with pytest.raises(ValueError, match="symmetry fixes all forces of these structures"):
        calibrate(model, [crystal] * 4)
    assert torch.equal(model.noise.w_z, width)


def test_energies_of_a_model_that_was_trained_without_offsets_stay():
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.3)
    structures = labelled_by_its_own_samples(model, 8)
    finetune(model, structures, config=FinetuneConfig(steps=1, samples=2, offsets=False))
    before = model.predict(structures).energy
    model.scale_spread(2.0)
    assert calibrate(model, structures).shift == 0
    torch.testing.assert_close(model.predict(structures).energy, before)


@pytest.mark.parametrize("energy_offsets", [True, False])
def test_energies_trained_without_offsets_are_not_shifted(energy_offsets):
    """Whether energies have offsets is part of the typed history, which a file keeps."""
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.3)
    structures = labelled_by_its_own_samples(model, 6)
    model.scale_spread(2.0)
    model.history = History(config={}, energy_offsets=energy_offsets)
    assert (calibrate(model, structures).shift != 0) == energy_offsets


@pytest.mark.parametrize("width", [0.2, 1.0, 8.0])
def test_the_best_factor_about_a_known_mean_does_not_depend_on_the_sample_mean(width):
    """All structures share the noise, so the sample mean of all of them is off by the same amount."""
    random = torch.Generator().manual_seed(1)
    noise = torch.randn(32, 1, generator=random, dtype=torch.float64)
    samples = width * (noise - noise.mean()) / noise.std() * torch.ones(5000, dtype=torch.float64)
    target, known = torch.randn(5000, generator=random, dtype=torch.float64), torch.zeros(5000)
    for moved in (0.0, 0.3 * width):
        assert best_factor(samples + moved, target, mean=known) == pytest.approx(1 / width, rel=0.05)


def with_energy_errors(model, structures, factor):
    """Label each structure by the energy of another sample, whose deviation from the mean is multiplied."""
    mean = model.sample_with_mean(structures, samples=200)[1].energy
    for index, atoms in enumerate(structures):
        sample = model.sample(atoms, samples=1, seed=1000 + index).energy[0, 0]
        atoms.calc.results["energy"] = float(mean[index] + factor * (sample - mean[index]))


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_energies_have_a_factor_of_their_own(factor, tmp_path):
    """It changes the spread that is reported, in evaluations too; samples and members stay as they are."""
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.1)
    structures = labelled_by_its_own_samples(model)
    with_energy_errors(model, structures, factor)
    model.scale_spread(2.0)
    model.history = History(config={}, energy_offsets=False)  # keeps the mean of the noise that made the labels
    found = calibrate(model, structures, samples=64)
    assert found.factor == pytest.approx(0.5, rel=0.15)  # of the forces alone
    assert found.energy_factor == pytest.approx(factor, rel=0.25)
    assert abs(np.log(found.energy_ssr[1])) < 0.25 < abs(np.log(found.energy_ssr[0]))
    drawn, mean = model.sample_with_mean(structures, samples=64)
    result = pmlip.evaluate(model, structures, samples=64)
    assert result.scores["energy"]["ssr"] == pytest.approx(1, abs=0.25)
    torch.testing.assert_close(result.drawn.spread.energy, found.energy_factor * drawn.spread.energy)
    assert torch.equal(result.drawn.forces, drawn.forces)
    atoms = structures[0].copy()
    atoms.calc = pmlip.PMLIPCalculator(model, samples=64, ensembles=True)
    assert atoms.get_potential_energy() == pytest.approx(float(mean.energy[0]))
    results, reported = atoms.calc.results, found.energy_factor * float(drawn.spread.energy[0])
    assert results["energy_uncertainty"] == pytest.approx(reported, rel=1e-6)
    assert results["energy_var"] == pytest.approx(reported**2, rel=1e-6)
    np.testing.assert_allclose(results["energy_ensemble"], drawn.energy[:, 0], atol=1e-9)
    member = model.member(2).calculator()
    assert member.get_potential_energy(structures[0].copy()) == pytest.approx(float(drawn.energy[2, 0]))
    # a file keeps the factor, and another calibration starts from the samples, not from the reported spread
    again = (model.save(tmp_path / "model.pt"), pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone()))[1]
    assert again.calibration == found
    assert calibrate(again, structures, samples=64).energy_factor == pytest.approx(found.energy_factor, rel=0.05)


@pytest.mark.parametrize(("labelled", "energies"), [(7, True), (20, False)])
def test_a_factor_of_the_energies_needs_enough_energies(labelled, energies):
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.1)
    structures = labelled_by_its_own_samples(model, 20)
    with_energy_errors(model, structures, 0.2)
    for atoms in structures[labelled:]:
        del atoms.calc.results["energy"]
    found = calibrate(model, structures, energies=energies)
    assert found.energy_factor == 1
    assert found.energy_ssr is None


def test_energies_without_a_label_do_not_count():
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.1)
    structures = labelled_by_its_own_samples(model, 30)
    with_energy_errors(model, structures, 0.2)
    for atoms in structures[:10]:
        del atoms.calc.results["energy"]
    found = calibrate(model, structures)
    drawn, mean = model.sample_with_mean(structures[10:], samples=16)
    atoms, target = drawn.atoms_per_system, pmlip.labels(structures[10:]).energy
    expected = best_factor(drawn.energy / atoms, target / atoms, mean=mean.energy / atoms)
    assert found.energy_factor == pytest.approx(expected, rel=1e-3)


def test_intervals_wider_than_the_forces_are_withheld():
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.1)
    structures = labelled_by_its_own_samples(model, 25)
    assert calibrate(model, structures, level=0.9).withheld is None
    few = calibrate(model, structures[:5], level=0.9)
    assert few.conformal is None
    assert few.withheld == "intervals with guaranteed 90% coverage need more than 5 structures"
    for index, atoms in enumerate(structures):  # half of the forces are pure noise, as in a file with wrong labels
        forces = atoms.calc.results["forces"]
        large = 20 * np.random.default_rng(index).standard_cauchy(size=forces.shape)
        atoms.calc.results["forces"] = 0.01 * forces + np.where(np.arange(4)[:, None] == 0, np.clip(large, -9, 9), 0)
    found = calibrate(model, structures, level=0.9)
    assert found.conformal is None
    assert "would be wider than the forces: their median half-width is" in found.withheld
    assert model.calibration.conformal_for(16) is None


def test_calibrations_from_before_have_no_factor_of_the_energies():
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.1)
    record = asdict(calibrate(model, labelled_by_its_own_samples(model, 25), level=0.9))
    assert Calibration.from_record(record) == model.calibration
    old = {name: value for name, value in record.items() if name not in ("withheld", "energy_factor", "energy_ssr")}
    loaded = Calibration.from_record(old)
    assert (loaded.energy_factor, loaded.energy_ssr, loaded.withheld) == (1.0, None, None)
    assert loaded.conformal == model.calibration.conformal
