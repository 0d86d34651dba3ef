import pickle

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from pmlip.structures.atoms import StructureError, as_structures
from pmlip.structures.labels import check_labels, labels


def labelled(**results):
    atoms = bulk("NaCl", "rocksalt", a=5.6)
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def test_labels_as_tensors_with_nan_for_what_is_missing():
    full = labelled(energy=-3.0, forces=np.ones((2, 3)), stress=np.arange(6.0))
    out = labels([full, bulk("Si")])
    assert out.energy.dtype == torch.float64
    assert out.energy[0] == -3
    assert out.energy[1].isnan()
    assert out.forces.shape == (4, 3)
    assert bool(out.forces[2:].isnan().all())
    assert out.stress[0].tolist() == list(range(6))
    assert bool(out.stress[1].isnan().all())
    assert out.system.tolist() == [0, 0, 1, 1]


def test_labels_survive_a_file(tmp_path):
    write(tmp_path / "data.extxyz", labelled(energy=-3.0, forces=np.eye(3)[:2], stress=np.arange(6.0)))
    out = labels(read(tmp_path / "data.extxyz", index=":"))
    assert out.energy.tolist() == [-3]
    assert out.forces.tolist() == np.eye(3)[:2].tolist()
    assert out.stress[0].tolist() == list(range(6))


def test_a_stress_without_a_cell_is_no_label():
    atoms = labelled(energy=-3.0, forces=np.ones((2, 3)), stress=np.zeros(6))
    bare = Atoms(atoms.symbols, atoms.positions)
    bare.calc = SinglePointCalculator(bare, **atoms.calc.results)
    assert labels(atoms).stress.isfinite().all()
    assert labels(bare).stress.isnan().all()
    check_labels(
        [atoms, bare], labels([atoms, bare]), ["energy", "forces", "stress"], missing=False
    )  # and none is asked for
    del atoms.calc.results["stress"]
    both = [labelled(forces=np.ones((2, 3)), stress=np.zeros(6)), atoms]
    with pytest.raises(StructureError, match=r"structure 1 .*carries no stress, and 1 of 2"):
        check_labels(both, labels(both), ["stress"], missing=False)


def test_stress_may_be_a_full_matrix():
    matrix = np.array([[1.0, 6, 5], [6, 2, 4], [5, 4, 3]])
    atoms = labelled()
    atoms.calc.results["stress"] = matrix
    assert labels(atoms).stress[0].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("structures", "error", "message"),
    [
        ([], ValueError, "the list is empty"),
        ([bulk("Si"), "POSCAR"], TypeError, "structure 1 is a str"),
        ([bulk("Si"), Atoms()], StructureError, "structure 1 .*no atoms"),
        (Atoms("H", [[np.nan, 0, 0]]), StructureError, r"structure 0 \(H\): a position or a cell vector is NaN"),
        (Atoms("H", info={"charge": "neutral"}), StructureError, "its charge must be a number, got 'neutral'"),
        (Atoms("H", info={"spin": [1, 2]}), StructureError, r"its spin must be a number, got \[1, 2\]"),
    ],
)
def test_what_cannot_be_a_structure_is_refused(structures, error, message):
    with pytest.raises(error, match=message):
        as_structures(structures)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_labels_that_are_not_numbers_are_refused(value):
    with pytest.raises(StructureError, match=r"structure 1 \(ClNa\): its label 'energy' is NaN or infinite"):
        labels([labelled(energy=1.0), labelled(energy=value)])


def test_labels_of_other_positions_are_refused():
    """One calculator for many structures holds the results of the last one only."""
    calculator = EMT()
    structures = [bulk("Cu"), bulk("Cu", a=3.7)]
    for atoms in structures:
        atoms.calc = calculator
        atoms.get_forces()
    with pytest.raises(StructureError, match=r"structure 0 .*belong to other positions or to another structure"):
        labels(structures)
    moved = labelled(energy=1.0)
    moved.rattle(0.1)
    with pytest.raises(StructureError, match="belong to other positions"):
        labels(moved)


def test_forces_of_a_wrong_shape_are_refused():
    atoms = labelled()
    atoms.calc.results["forces"] = np.zeros((3, 3))
    with pytest.raises(StructureError, match=r"forces must have shape \(2, 3\), got \(3, 3\)"):
        labels(atoms)


def test_an_error_about_a_structure_comes_back_from_another_process():
    error = StructureError(bulk("Si"), 3, "it has no atoms").after(4)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is StructureError
    assert (str(again), again.index) == (str(error), 7)
