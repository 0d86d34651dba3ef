"""Structures turned at random, with their labels: how a potential that is not equivariant learns to be."""

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress, voigt_6_to_full_3x3_stress

from pmlip.structures import LABELS


def random_rotation(random: np.random.Generator) -> np.ndarray:
    """A rotation, all equally likely (a unit quaternion)."""
    w, x, y, z = (q := random.normal(size=4)) / np.linalg.norm(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def rotated(atoms: Atoms, matrix: np.ndarray) -> Atoms:
    """The structure and its labels, turned."""
    turned = atoms.copy()
    turned.set_cell(atoms.cell.array @ matrix.T)
    turned.positions = atoms.positions @ matrix.T
    results = dict(atoms.calc.results) if atoms.calc is not None else {}
    if "forces" in results:
        results["forces"] = np.asarray(results["forces"]) @ matrix.T
    if "stress" in results:
        full = np.asarray(results["stress"], dtype=float)
        full = full if full.shape == (3, 3) else voigt_6_to_full_3x3_stress(full)
        results["stress"] = full_3x3_to_voigt_6_stress(matrix @ full @ matrix.T)
    kept = {name: results[name] for name in LABELS if name in results}
    turned.calc = SinglePointCalculator(turned, **kept)
    return turned
