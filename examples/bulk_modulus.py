"""Bulk modulus of quartz with an error bar, compared with PBE. The cell scales uniformly and atoms do not relax.

python bulk_modulus.py p-chgnet/model.pt
"""

import sys

import numpy as np
from ase.calculators.calculator import Calculator
from ase.eos import EquationOfState
from ase.units import GPa

import pmlip

STRUCTURES = pmlip.datasets.silica_pbe("eos")


def bulk_modulus(energies: list[float]) -> float:
    """Bulk modulus in GPa from the energies of the structures (Birch-Murnaghan)."""
    volumes = [atoms.get_volume() for atoms in STRUCTURES]
    return float(EquationOfState(volumes, energies, eos="birchmurnaghan").fit(warn=False)[2]) / GPa


def modulus_of_sample(calculator: Calculator) -> float:
    return bulk_modulus([calculator.get_potential_energy(atoms.copy()) for atoms in STRUCTURES])


found = pmlip.propagate(modulus_of_sample, sys.argv[1], samples=16)
reference = bulk_modulus([atoms.get_potential_energy() for atoms in STRUCTURES])
print(f"bulk modulus of quartz, atoms fixed: {found} GPa; PBE {reference:.1f} GPa")
print(f"the error is {abs(found.mean - reference) / (np.sqrt(1 + 1 / len(found.values)) * found.spread):.1f} sigma")
