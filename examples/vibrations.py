"""Vibrational frequencies of a quartz cell with error bars, from finite differences of the forces of each sample.

python vibrations.py p-chgnet/model.pt
"""

import sys

import numpy as np
from ase import units
from ase.calculators.calculator import Calculator
from ase.spacegroup import crystal

import pmlip

QUARTZ = crystal(
    ["Si", "O"],
    [(0.4697, 0, 1 / 3), (0.4135, 0.2669, 0.2145)],
    spacegroup=152,
    cellpar=[4.913, 4.913, 5.405, 90, 90, 120],
)
STEP = 0.01  # Å


def frequencies(calculator: Calculator) -> np.ndarray:
    """Frequencies at the centre of the Brillouin zone in THz, in ascending order; unstable modes are negative."""
    hessian = []
    for atom in range(len(QUARTZ)):
        for axis in range(3):
            forces = []
            for sign in (1, -1):
                moved = QUARTZ.copy()
                moved.positions[atom, axis] += sign * STEP
                forces.append(calculator.get_forces(moved).ravel())
            hessian.append((forces[1] - forces[0]) / (2 * STEP))
    root = np.repeat(QUARTZ.get_masses(), 3) ** 0.5
    dynamical = np.array(hessian) / np.outer(root, root)
    squares = np.linalg.eigvalsh((dynamical + dynamical.T) / 2)
    return np.sign(squares) * np.sqrt(np.abs(squares)) / (2 * np.pi) * 1000 * units.fs


found = pmlip.propagate(frequencies, sys.argv[1], samples=6)
print("modes of quartz at the zone centre, THz:")
for mean, spread in zip(found.mean, found.spread, strict=True):
    print(f"{mean:7.2f} ± {spread:.2f}")
