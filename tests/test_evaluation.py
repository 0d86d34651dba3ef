import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import pmlip
from conftest import randomise_noise
from molecules import molecules
from pmlip import metrics, scores
from pmlip.evaluation import as_record, compare, evaluate, rank_together
from pmlip.methods.deterministic import Deterministic
from pmlip.structures.labels import labels
from tiny import tiny_backbone


@pytest.fixture(scope="module")
def model():
    return randomise_noise(pmlip.perturb(tiny_backbone()))


def test_scores_are_those_of_the_samples(model):
    data = molecules()
    result = evaluate(model, data, samples=6, seed=3)
    drawn, target = model.sample(data, samples=6, seed=3), labels(data)
    forces = result.scores["forces"]
    assert forces["mae"] == pytest.approx(float((drawn.mean.forces - target.forces).abs().mean()))
    assert forces["crps"] == pytest.approx(float(scores.fair_crps(drawn.forces, target.forces).mean()))
    mean = model.sample_with_mean(data, samples=6, seed=3)[1].forces
    assert forces["mae_expected"] == pytest.approx(float((mean - target.forces).abs().mean()))
    assert forces["mae_without_noise"] == pytest.approx(
        float((model.predict(data).forces - target.forces).abs().mean())
    )
    expected = metrics.spread_skill_ratio(drawn.mean.forces, drawn.spread.forces, target.forces, 6)
    assert forces["ssr"] == pytest.approx(expected)
    atoms = target.atoms_per_system
    energy = scores.fair_crps(drawn.energy / atoms, target.energy / atoms).mean()
    assert result.scores["energy"]["crps"] == pytest.approx(float(energy))
    assert "stress" not in result.scores
    own = drawn.system == 4
    spread = drawn.spread.forces[own].square().mean().sqrt()
    assert result.spread[4] == pytest.approx(float(spread))
    record = as_record(result)
    assert record["samples"] == 6
    assert record["forces"] == forces


def test_structures_without_any_label_are_refused(model):
    with pytest.raises(ValueError, match=r"carry no labels to compare with; note that Atoms.copy\(\) drops labels"):
        pmlip.evaluate(model, [atoms.copy() for atoms in molecules(3)])


def test_labels_that_are_not_there_do_not_count(model):
    data, fewer = molecules(), molecules()
    del fewer[2].calc.results["energy"]
    energy = evaluate(model, fewer, samples=4).scores["energy"]
    present = evaluate(model, [atoms for i, atoms in enumerate(data) if i != 2], samples=4).scores["energy"]
    assert energy == pytest.approx(present)


def test_a_deterministic_model_has_errors_and_no_spread():
    result = evaluate(Deterministic(tiny_backbone()), molecules())
    assert result.samples == 1
    assert result.scores["forces"]["crps"] == pytest.approx(result.scores["forces"]["mae"])
    assert "ssr" not in result.scores["forces"]
    assert not result.spread.any()
    assert result.scaled(1.0).scores == result.scores
    with pytest.raises(ValueError, match="a spread needs at least 2 samples to be scaled, got samples=1"):
        result.scaled(2.0)


def test_a_noise_never_trained_has_no_spread_to_score():
    result = evaluate(pmlip.perturb(tiny_backbone()), molecules(), samples=4)
    assert "ssr" not in result.scores["forces"]


def test_where_symmetry_makes_all_forces_zero_the_energies_are_scored(model):
    structures = [Atoms("Si", positions=[[0.0, 0.0, 0.0]]) for _ in range(4)]
    for atoms in structures:
        atoms.calc = SinglePointCalculator(atoms, energy=1.0, forces=np.zeros((1, 3)))
    result = evaluate(model, structures, samples=4)
    assert result.scores["energy"]["mae"] > 0
    assert result.scores["forces"]["mae"] == 0
    assert "ssr" not in result.scores["forces"]


def test_the_best_ranking_is_that_of_a_model_whose_samples_hold_the_truth(model):
    data = molecules(30)
    truths = model.sample(data, samples=20, seed=7)
    found = []
    for k in range(20):
        labelled = [atoms.copy() for atoms in data]
        for index, atoms in enumerate(labelled):
            atoms.calc = SinglePointCalculator(atoms, forces=truths.forces[k][truths.system == index].numpy())
        result = evaluate(model, labelled, samples=32).scores["forces"]
        found.append(result["spearman_structure"])
    assert 0.2 < result["spearman_structure_at_best"] < 0.95
    assert np.mean(found) == pytest.approx(result["spearman_structure_at_best"], abs=0.15)


def test_sets_are_ranked_together_as_one_set(model):
    structures = molecules(12)
    whole = evaluate(model, structures, samples=8)
    together = rank_together([evaluate(model, part, samples=8) for part in (structures[:5], structures[5:])])
    scores = whole.scores["forces"]
    assert together["spearman"] == pytest.approx(scores["spearman_structure"])
    assert together["spearman_of_force"] == pytest.approx(scores["spearman_structure_of_force"])


def test_out_of_distribution(model):
    inside = evaluate(model, molecules(12), samples=8)
    assert compare(inside, inside) == pytest.approx(
        {"auroc_spread": 0.5, "auroc_force": 0.5, "auroc_error": 0.5, "spread_ratio": 1.0, "error_ratio": 1.0}
    )
    torn = molecules(12, seed=4)
    for atoms in torn:
        atoms.calc.results["forces"] = atoms.calc.results["forces"] + 10 * np.sign(atoms.positions)
    assert compare(inside, evaluate(model, torn, samples=8))["auroc_error"] == 1
    for atoms in torn:
        del atoms.calc.results["forces"]
    assert compare(inside, evaluate(model, torn, samples=8)).keys() == {"auroc_spread", "auroc_force", "spread_ratio"}


def test_progress_counts_structures(model):
    seen = []
    evaluate(model, molecules(), samples=2, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (10, 10)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert torch.is_grad_enabled()
