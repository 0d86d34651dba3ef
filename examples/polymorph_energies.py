"""Energy difference between cristobalite and quartz, with an error bar.

python polymorph_energies.py p-chgnet/model.pt
"""

import sys

import numpy as np
from ase.calculators.calculator import Calculator
from ase.spacegroup import crystal

import pmlip

STRUCTURES = {
    "quartz": crystal(
        ["Si", "O"],
        [(0.4697, 0, 1 / 3), (0.4135, 0.2669, 0.2145)],
        spacegroup=152,
        cellpar=[4.913, 4.913, 5.405, 90, 90, 120],
    ),
    "cristobalite": crystal(
        ["Si", "O"],
        [(0.3003, 0.3003, 0), (0.2392, 0.1044, 0.1787)],
        spacegroup=92,
        cellpar=[4.972, 4.972, 6.922, 90, 90, 90],
    ),
}


def energies(calculator: Calculator) -> list[float]:
    """Energies of both structures in meV per SiO2."""
    return [3e3 * calculator.get_potential_energy(atoms.copy()) / len(atoms) for atoms in STRUCTURES.values()]


found = pmlip.propagate(energies, sys.argv[1], samples=16)
difference = found.values[:, 1] - found.values[:, 0]  # per sample, so that errors common to both structures cancel
print(f"cristobalite - quartz: {difference.mean():.1f} ± {difference.std(ddof=1):.1f} meV per SiO2")
print(f"as if the two errors were independent, which is wrong: ± {np.hypot(*found.spread):.1f}")
