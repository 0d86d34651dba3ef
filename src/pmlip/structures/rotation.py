"""Random rotations of structures and labels: data augmentation for potentials that are not equivariant."""

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress, voigt_6_to_full_3x3_stress
from scipy.spatial.transform import Rotation

from pmlip.structures import LABELS


def random_rotation(random: np.random.Generator) -> np.ndarray:
    """Return a uniformly distributed rotation matrix."""
    w, *xyz = random.normal(size=4)
    matrix: np.ndarray = Rotation.from_quat([*xyz, w]).as_matrix()
    return matrix


def rotated(atoms: Atoms, matrix: np.ndarray) -> Atoms:
    """Return a rotated copy of the structure and its labels."""
    copied = atoms.copy()
    copied.set_cell(atoms.cell.array @ matrix.T)
    copied.positions = atoms.positions @ matrix.T
    results = dict(atoms.calc.results) if atoms.calc is not None else {}
    if "forces" in results:
        results["forces"] = np.asarray(results["forces"]) @ matrix.T
    if "stress" in results:
        full = np.asarray(results["stress"], dtype=float)
        full = full if full.shape == (3, 3) else voigt_6_to_full_3x3_stress(full)
        results["stress"] = full_3x3_to_voigt_6_stress(matrix @ full @ matrix.T)
    kept = {name: results[name] for name in LABELS if name in results}
    copied.calc = SinglePointCalculator(copied, **kept)
    return copied
