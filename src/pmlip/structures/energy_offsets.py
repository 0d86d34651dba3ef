"""Energies of different DFT settings differ by a constant per element; fitted here, and moved into a backbone."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
from ase import Atoms, units

LARGEST_RESIDUAL = 1.0  # eV per atom; more than this no pretrained potential is off
OTHER_UNITS = {  # one eV in each
    "Hartree": 1 / units.Hartree,
    "Rydberg": 1 / units.Rydberg,
    "kcal/mol": units.mol / units.kcal,
    "kJ/mol": units.mol / units.kJ,
}
# for a word about units: structures, eV per atom by which their predictions differ, and their correlation with labels
FEWEST, LEAST_SPREAD, LEAST_CORRELATION = 8, 0.005, 0.7


def fit_offsets(energies: np.ndarray, predicted: np.ndarray, structures: Sequence[Atoms]) -> dict[int, float]:
    """Least squares: the energy per atom of each element that explains energies - predicted (eV) best.

    Where the compositions leave it open (all structures are SiO2, say), the smallest offsets are taken. An energy that
    is NaN, a missing label, does not count. Warns where the energies are probably not in eV.
    """
    elements = sorted({int(number) for atoms in structures for number in atoms.numbers})
    counts = np.array([[np.count_nonzero(atoms.numbers == number) for number in elements] for atoms in structures])
    labelled = np.isfinite(energies)
    if not labelled.any():
        return {}
    # per atom: each structure counts the same, whatever its size
    atoms_in = counts.sum(1)[labelled]
    shares, given, expected = counts[labelled] / atoms_in[:, None], energies[labelled], predicted[labelled]
    solution, *_ = np.linalg.lstsq(shares, (given - expected) / atoms_in, rcond=None)
    beyond = (_beyond_composition(values / atoms_in, shares) for values in (given, expected))
    if doubt := _doubt_about_units(*beyond):
        warnings.warn(f"{doubt}: are the energies in eV?", stacklevel=2)
    return dict(zip(elements, solution.tolist(), strict=True))


def _beyond_composition(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Energies per atom without what the shares of the elements explain."""
    explained: np.ndarray = shares @ np.linalg.lstsq(shares, values, rcond=None)[0]
    return values - explained


def _doubt_about_units(given: np.ndarray, expected: np.ndarray) -> str:
    """Why energies per atom are probably not in eV, from these beyond composition and their predictions."""
    spreads = [float(np.sqrt(np.mean(values**2))) for values in (given, expected)]
    if len(given) >= FEWEST and spreads[1] > LEAST_SPREAD:
        correlation = float(np.mean(given * expected)) / max(spreads[0] * spreads[1], 1e-12)
        slope = correlation * spreads[0] / spreads[1]
        if correlation > LEAST_CORRELATION and not 0.5 < slope < 2:
            nearest = min(OTHER_UNITS, key=lambda unit: abs(math.log(OTHER_UNITS[unit] / slope)))
            close = abs(math.log(OTHER_UNITS[nearest] / slope)) < math.log(1.4)
            alike = f", as {nearest} would" if close else ""
            return f"energies differ {slope:.2g} times as much as predictions{alike}"
    rest = float(np.sqrt(np.mean((given - expected) ** 2)))
    if rest > LARGEST_RESIDUAL:
        return f"after fitting an energy per element, energies and predictions still differ by {rest:.1f} eV/atom"
    return ""
