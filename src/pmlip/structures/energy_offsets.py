"""Fit energy offsets per element: the energies of two DFT settings differ by about a constant per element."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
from ase import Atoms, units

LARGEST_RESIDUAL = 1.0  # eV per atom; pretrained potentials have smaller errors once offsets are fitted
OTHER_UNITS = {  # 1 eV in each unit
    "Hartree": 1 / units.Hartree,
    "Rydberg": 1 / units.Rydberg,
    "kcal/mol": units.mol / units.kcal,
    "kJ/mol": units.mol / units.kJ,
}
# The slope of labels against predictions tests the unit only with this many structures, this standard deviation of the
# predictions (eV per atom) and this correlation.
FEWEST, LEAST_SPREAD, LEAST_CORRELATION = 8, 0.005, 0.7


def fit_offsets(energies: np.ndarray, predicted: np.ndarray, structures: Sequence[Atoms]) -> dict[int, float]:
    """Fit one energy per atom of each element to energies - predicted (eV) by least squares.

    If the compositions do not determine the offsets (for example, all structures are SiO2), the solution with the
    smallest norm is returned. Missing labels (NaN) are ignored. Warns if the energies are probably not in eV.
    """
    elements = sorted({int(number) for atoms in structures for number in atoms.numbers})
    counts = np.array([[np.count_nonzero(atoms.numbers == number) for number in elements] for atoms in structures])
    labelled = np.isfinite(energies)
    if not labelled.any():
        return {}
    # fit per atom, so that each structure has the same weight whatever its size
    atoms_in = counts.sum(1)[labelled]
    shares, given, expected = counts[labelled] / atoms_in[:, None], energies[labelled], predicted[labelled]
    solution, *_ = np.linalg.lstsq(shares, (given - expected) / atoms_in, rcond=None)
    residuals = (_composition_residual(values / atoms_in, shares) for values in (given, expected))
    if problem := _unit_problem(*residuals):
        warnings.warn(f"{problem}; check that the energies are in eV", stacklevel=2)
    return dict(zip(elements, solution.tolist(), strict=True))


def _composition_residual(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Subtract from energies per atom their least-squares fit on the fractions of the elements."""
    explained: np.ndarray = shares @ np.linalg.lstsq(shares, values, rcond=None)[0]
    return values - explained


def _unit_problem(given: np.ndarray, expected: np.ndarray) -> str:
    """Say why energies per atom are probably not in eV, or return "".

    given, expected: labels and predictions after `_composition_residual`.
    """
    spreads = [float(np.sqrt(np.mean(values**2))) for values in (given, expected)]
    if len(given) >= FEWEST and spreads[1] > LEAST_SPREAD:
        correlation = float(np.mean(given * expected)) / max(spreads[0] * spreads[1], 1e-12)
        slope = correlation * spreads[0] / spreads[1]
        if correlation > LEAST_CORRELATION and not 0.5 < slope < 2:
            nearest = min(OTHER_UNITS, key=lambda unit: abs(math.log(OTHER_UNITS[unit] / slope)))
            close = abs(math.log(OTHER_UNITS[nearest] / slope)) < math.log(1.4)
            hint = f", as energies in {nearest} would" if close else ""
            return f"energies vary {slope:.2g} times as much as predictions{hint}"
    rest = float(np.sqrt(np.mean((given - expected) ** 2)))
    if rest > LARGEST_RESIDUAL:
        return f"after fitting an offset per element, energies and predictions still differ by {rest:.1f} eV/atom"
    return ""
