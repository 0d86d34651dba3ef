"""Fit energy offsets per element: the energies of two DFT settings differ by about a constant per element."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from ase import Atoms, units
from ase.formula import Formula

from pmlip.structures.labels import labels

LARGEST_RESIDUAL = 1.0  # eV per atom; pretrained potentials have smaller errors once offsets are fitted
OTHER_UNITS = {  # 1 eV in each unit
    "Hartree": 1 / units.Hartree,
    "Rydberg": 1 / units.Rydberg,
    "kcal/mol": units.mol / units.kcal,
    "kJ/mol": units.mol / units.kJ,
}
OTHER_FORCE_UNITS = {  # 1 eV/Å in each unit
    "kcal/mol/Å": units.mol / units.kcal,
    "kJ/mol/Å": units.mol / units.kJ,
    "Hartree/Bohr": units.Bohr / units.Hartree,
    "Hartree/Å": 1 / units.Hartree,
    "Rydberg/Bohr": units.Bohr / units.Rydberg,
    "eV/Bohr": units.Bohr,
}
# The slope of labels against predictions tests the unit only with this many structures, this standard deviation of the
# predictions (eV per atom) and this correlation.
FEWEST, LEAST_SPREAD, LEAST_CORRELATION = 8, 0.005, 0.7
LARGEST_GUESS = 10.0  # eV per atom, of an offset that the compositions do not determine
LONELY = 6.0  # Å; an atom whose periodic images are further away is isolated
NOTHING: Mapping[int, float] = MappingProxyType({})


def fit_offsets(
    energies: np.ndarray,
    predicted: np.ndarray,
    structures: Sequence[Atoms],
    *,
    known: Mapping[int, float] = NOTHING,
) -> dict[int, float]:
    """Fit one energy per atom of each element to energies - predicted (eV) by least squares.

    known: offsets of elements that are known otherwise, from isolated atoms. If the compositions do not determine all
    offsets (for example, all structures are SiO2), the solution that is closest to the known offsets, and to zero for
    other elements, is returned. Missing labels (NaN) are ignored. Warns if the energies are probably not in eV.
    """
    labelled = np.isfinite(energies)
    if not labelled.any():
        return {}
    used = [atoms for atoms, label in zip(structures, labelled, strict=True) if label]
    elements = sorted({int(number) for atoms in structures for number in atoms.numbers})
    counts = _counts(used, elements)
    # fit per atom, so that each structure has the same weight whatever its size
    atoms_in = counts.sum(1)
    shares, given, expected = counts / atoms_in[:, None], energies[labelled], predicted[labelled]
    start = np.array([known.get(number, 0.0) for number in elements])
    change, *_ = np.linalg.lstsq(shares, (given - expected) / atoms_in - shares @ start, rcond=1e-9)
    solution = start + change
    residuals = (_composition_residual(values / atoms_in, shares) for values in (given, expected))
    if problem := _unit_problem(*residuals):
        warnings.warn(f"{problem}; check that the energies are in eV", stacklevel=2)
    return dict(zip(elements, solution.tolist(), strict=True))


def guessed_offsets(offsets: Mapping[int, float], formulas: Sequence[str], known: Iterable[int]) -> str:
    """What large offsets mean that neither the compositions of the training set nor isolated atoms determine, or ""."""
    guessed = [abs(offset) for number, offset in offsets.items() if number not in set(known)]
    if len(formulas) >= len(offsets) or not guessed or max(guessed) < LARGEST_GUESS:
        return ""
    return (
        f"energies are comparable only between structures whose elements have the same ratios as in the training set "
        f"({', '.join(formulas)}): these ratios do not determine the energy of each element, and the labels are up to "
        f"{max(guessed):.0f} eV per atom away from the potential. To compare other compositions, give the energies of "
        "isolated atoms"
    )


def _counts(structures: Sequence[Atoms], elements: Sequence[int]) -> np.ndarray:
    """Number of atoms of each element, (structure, element)."""
    return np.array([[np.count_nonzero(atoms.numbers == number) for number in elements] for atoms in structures])


def compositions(structures: Sequence[Atoms]) -> list[str]:
    """Reduced formulas of structures whose ratios of elements all others combine: at most one for each element."""
    found: list[str] = []
    seen: set[str] = set()
    for atoms in structures:
        formula = reduced_formula(atoms)
        if formula not in seen and not is_combination(atoms, found):
            found.append(formula)
        seen.add(formula)
    return found


def is_combination(atoms: Atoms, formulas: Sequence[str]) -> bool:
    """Whether the numbers of atoms of each element are a linear combination of the numbers in these formulas."""
    if not formulas or reduced_formula(atoms) in formulas:
        return bool(formulas)
    parts = [Formula(formula).count() for formula in formulas]
    own = atoms.symbols.formula.count()
    elements = sorted(set(own).union(*parts))
    rows = np.array([[part.get(element, 0) for element in elements] for part in [*parts, own]], dtype=float)
    rows /= rows.sum(1, keepdims=True)
    return bool(np.linalg.matrix_rank(rows) == np.linalg.matrix_rank(rows[:-1]))


def reduced_formula(atoms: Atoms) -> str:
    return f"{atoms.symbols.formula.reduce()[0]:hill}"


def without_isolated(structures: Sequence[Atoms]) -> tuple[list[Atoms], dict[int, float]]:
    """The structures that are not isolated atoms, and the lowest energy (eV) of the isolated atoms of each element.

    Isolated atoms tell the energies of elements. There is nothing else to learn from them, and some potentials refuse
    them.
    """
    rest, energies = [], dict[int, float]()
    for atoms in structures:
        if not _is_isolated(atoms):
            rest.append(atoms)
            continue
        energy, number = float(labels([atoms]).energy[0]), int(atoms.numbers[0])
        if math.isfinite(energy):
            energies[number] = min(energy, energies.get(number, math.inf))
    return rest, energies


def _is_isolated(atoms: Atoms) -> bool:
    if len(atoms) != 1:
        return False
    lengths = np.linalg.norm(np.asarray(atoms.cell), axis=1)[atoms.pbc]
    return bool((lengths > LONELY).all())


def _composition_residual(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Subtract from energies per atom their least-squares fit on the fractions of the elements."""
    explained: np.ndarray = shares @ np.linalg.lstsq(shares, values, rcond=None)[0]
    return values - explained


def _unit_problem(given: np.ndarray, expected: np.ndarray) -> str:
    """Say why energies per atom are probably not in eV, or return "".

    given, expected: labels and predictions after `_composition_residual`.
    """
    spread = float(np.sqrt(np.mean(expected**2)))
    if len(given) >= FEWEST and spread > LEAST_SPREAD and (other := _other_unit(given, expected, OTHER_UNITS)):
        return f"energies {other}"
    rest = float(np.sqrt(np.mean((given - expected) ** 2)))
    if rest > LARGEST_RESIDUAL:
        return f"after fitting an offset per element, energies and predictions still differ by {rest:.1f} eV/atom"
    return ""


def force_unit_problem(given: np.ndarray, expected: np.ndarray) -> str:
    """Say why force labels are probably not in eV/Å, compared with predictions, or return ""."""
    known = np.isfinite(given)
    if known.sum() < FEWEST or not expected[known].any():
        return ""
    other = _other_unit(given[known], expected[known], OTHER_FORCE_UNITS)
    return f"forces {other}" if other else ""


def _other_unit(given: np.ndarray, expected: np.ndarray, others: Mapping[str, float]) -> str:
    """How labels differ from predictions by a factor, and the unit that this factor suggests; "" if they do not."""
    spreads = [float(np.sqrt(np.mean(values**2))) for values in (given, expected)]
    correlation = float(np.mean(given * expected)) / max(spreads[0] * spreads[1], 1e-12)
    slope = correlation * spreads[0] / spreads[1]
    if correlation <= LEAST_CORRELATION or 0.5 < slope < 2:
        return ""
    nearest = min(others, key=lambda unit: abs(math.log(others[unit] / slope)))
    close = abs(math.log(others[nearest] / slope)) < math.log(1.4)
    hint = f", as in {nearest}" if close else ""
    return f"vary {slope:.2g} times as much as predictions{hint}"
