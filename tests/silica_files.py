"""Small pieces of silica, as published sets hold them."""

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.units import kcal, mol

from pmlip import datasets


def silica(count=5, *, per_atom=-7.8, seed=0):
    """Small pieces of silica with labels in eV, as a published set would hold them."""
    random = np.random.default_rng(seed)
    perfect = np.array([[0, 0, 0], [2, 2, 2], [1.2, 1.2, 0], [2.8, 2.8, 0], [0.8, 3.2, 2], [3.2, 0.8, 2]])
    made = []
    for _ in range(count):
        atoms = Atoms("Si2O4", perfect + random.normal(scale=0.05, size=(6, 3)), cell=[4, 4, 4], pbc=True)
        forces = random.normal(size=(6, 3))
        atoms.calc = SinglePointCalculator(atoms, energy=6 * per_atom + random.normal(), forces=forces)
        made.append(atoms)
    return made


def in_kcal(structures):
    return [datasets._scaled(atoms, mol / kcal) for atoms in structures]
