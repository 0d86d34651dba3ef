"""Energy drift of MD at constant energy, with the mean of the samples and with a single sample.

python nve_drift.py p-chgnet/model.pt
"""

import sys

import numpy as np
from ase import units
from ase.calculators.calculator import Calculator
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet

import pmlip

QUARTZ = min(pmlip.datasets.silica_pbe("eos"), key=lambda atoms: abs(atoms.info["strain"]))
STEPS, STEP = 60, 1.0  # fs


def drift(calculator: Calculator) -> tuple[float, float]:
    """Slope of the total energy in meV/atom per ps, and its fluctuation in meV/atom."""
    atoms = QUARTZ.copy()
    atoms.calc = calculator
    thermalize_momenta(atoms, temperature_K=300, rng=np.random.default_rng(0))
    motion = VelocityVerlet(atoms, STEP * units.fs)
    energies = []
    for _ in range(STEPS):
        motion.run(1)
        energies.append(1e3 * atoms.get_total_energy() / len(atoms))
    slope, start = np.polyfit(STEP * 1e-3 * np.arange(STEPS), energies, 1)
    return slope, np.std(energies - start - slope * STEP * 1e-3 * np.arange(STEPS))


model = pmlip.load(sys.argv[1])
for name, calculator in {
    "mean of 8 samples": pmlip.PMLIPCalculator(model, samples=8),
    "sample 0, folded": model.fold(sample=0).calculator(),
}.items():
    slope, fluctuation = drift(calculator)
    print(f"{name}: {slope:+.2f} meV/atom per ps, fluctuating by {fluctuation:.3f} meV/atom at steps of {STEP:g} fs")
