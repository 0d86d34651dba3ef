import warnings

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator

from pmlip.datasets import silica_pbe
from pmlip.structures.energy_offsets import (
    compositions,
    fit_offsets,
    force_unit_problem,
    guessed_offsets,
    is_combination,
    without_isolated,
)
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
    with pytest.warns(UserWarning, match=rf"times as much as predictions, as in {name}; check that the"):
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


def ethanol(energy):
    atoms = molecule("CH3CH2OH")
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=np.zeros((9, 3)))
    return atoms


ATOMIC = {1: -13.6, 6: -1029.0, 8: -2041.0}  # eV, energies of all electrons


def test_one_composition_leaves_the_energies_of_elements_open():
    total = sum(ATOMIC[number] for number in molecule("CH3CH2OH").numbers)
    offsets = fit_offsets(np.full(4, total), np.full(4, -20.0), [ethanol(total)] * 4)
    assert "(C2H6O): these ratios do not determine" in guessed_offsets(offsets, ["C2H6O"], [])
    assert guessed_offsets(offsets, ["C2H6O"], ATOMIC) == ""
    assert guessed_offsets(offsets, ["C2H6O", "H2O", "CO2"], []) == ""
    assert guessed_offsets({1: 0.1, 8: -0.2}, ["H2O"], []) == ""


def test_isolated_atoms_settle_what_compositions_leave_open():
    total = sum(ATOMIC[number] for number in molecule("CH3CH2OH").numbers)
    binding = -30.0
    fitted = fit_offsets(np.full(4, total + binding), np.zeros(4), [ethanol(total)] * 4, known=ATOMIC)
    assert {number: round(fitted[number] - ATOMIC[number]) for number in ATOMIC} == pytest.approx(
        {1: -4, 6: -1, 8: -1}, abs=1
    )
    per_formula = sum(fitted[number] for number in molecule("CH3CH2OH").numbers)
    assert per_formula == pytest.approx(total + binding)


def test_isolated_atoms_are_taken_out_of_a_training_set():
    hydrogen, boxed, iron = Atoms("H"), Atoms("O", cell=[10, 10, 10], pbc=True), bulk("Fe")
    for atoms, energy in ((hydrogen, -13.6), (boxed, -430.0), (iron, -8.0)):
        atoms.calc = SinglePointCalculator(atoms, energy=energy)
    lower = hydrogen.copy()
    lower.calc = SinglePointCalculator(lower, energy=-13.7)
    rest, energies = without_isolated([ethanol(-1.0), hydrogen, boxed, lower, iron])
    assert [len(atoms) for atoms in rest] == [9, 1]
    assert energies == {1: -13.7, 8: -430.0}


@pytest.mark.parametrize(
    ("formula", "inside"), [("CH3CH2OH", True), ("C4H12O2", True), ("C2H5O", False), ("H2O", False), ("N2", False)]
)
def test_a_composition_is_compared_with_those_of_the_training_set(formula, inside):
    assert is_combination(Atoms(formula), ["C2H6O"]) is inside


def test_compositions_span_those_of_all_structures():
    found = compositions([Atoms(formula) for formula in ("Si2O4", "SiO2", "Si", "SiO", "O2", "Si3O")])
    assert found == ["O2Si", "Si"]
    assert all(is_combination(Atoms(formula), found) for formula in ("O2", "SiO", "Si5O3"))


@pytest.mark.parametrize(("unit", "name"), [(units.kcal / units.mol, "kcal/mol/Å"), (51.42, "Hartree/Bohr"), (1, "")])
def test_another_unit_of_forces_is_named(unit, name):
    random = np.random.default_rng(0)
    expected = random.normal(size=(30, 3))
    given = (0.8 * expected + 0.2 * random.normal(size=(30, 3))) / unit
    given[0] = np.nan
    problem = force_unit_problem(given, expected)
    assert problem.endswith(f"as in {name}") if name else problem == ""
