import warnings

import numpy as np
import pytest
from ase import units

from pmlip.datasets import silica_pbe
from pmlip.structures.energy_offsets import fit_offsets
from pmlip.structures.labels import labels

STRUCTURES = silica_pbe("train")[:40]
ENERGIES = labels(STRUCTURES).energy.numpy()
ATOMS = np.array([len(atoms) for atoms in STRUCTURES])


def predictions(softness, noise=0.002):
    """What a potential would say whose energies per atom differ so many times as much, and are a little off."""
    per_atom = ENERGIES / ATOMS
    wrong = np.random.default_rng(0).normal(0, noise, len(ENERGIES))
    return ATOMS * (per_atom.mean() + softness * (per_atom - per_atom.mean()) + wrong)


def test_offsets_are_what_was_taken_away():
    known = {8: -1.5, 14: 3.0}
    moved = ENERGIES + [sum(known[number] for number in atoms.numbers) for atoms in STRUCTURES]
    fitted = fit_offsets(moved, ENERGIES, STRUCTURES)
    per_formula = fitted[14] + 2 * fitted[8]
    assert per_formula == pytest.approx(known[14] + 2 * known[8])  # all are SiO2, so no more can be known


def test_missing_energies_do_not_count():
    some = ENERGIES.copy()
    some[::2] = np.nan
    predicted = ENERGIES - 2.0 * ATOMS
    assert fit_offsets(some, predicted, STRUCTURES) == pytest.approx(
        fit_offsets(ENERGIES[1::2], predicted[1::2], STRUCTURES[1::2])
    )
    assert fit_offsets(np.full(40, np.nan), ENERGIES, STRUCTURES) == {}


@pytest.mark.parametrize(
    ("unit", "name"),
    [
        (units.Hartree, "Hartree"),
        (units.Rydberg, "Rydberg"),
        (units.kcal / units.mol, "kcal/mol"),
        (units.kJ / units.mol, "kJ/mol"),
    ],
)
def test_another_unit_is_named(unit, name):
    with pytest.warns(UserWarning, match=rf"times as much as predictions, as energies in {name} would; check that the"):
        fit_offsets(ENERGIES / unit, predictions(0.9), STRUCTURES)


def test_energies_that_fit_in_no_way_are_warned_about():
    wild = ENERGIES + 30 * np.random.default_rng(1).normal(size=len(ENERGIES))
    with pytest.warns(UserWarning, match=r"still differ by \d\.\d eV/atom"):
        fit_offsets(wild, predictions(0.9), STRUCTURES)


def test_a_potential_that_is_off_is_no_reason_for_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for softness in (0.6, 1.0, 1.5):
            fit_offsets(ENERGIES, predictions(softness), STRUCTURES)
        fit_offsets(ENERGIES, predictions(0.0, noise=0.05), STRUCTURES)  # nothing to compare with
        fit_offsets(ENERGIES[:3] / units.Hartree, predictions(0.9)[:3], STRUCTURES[:3])  # too few to tell
