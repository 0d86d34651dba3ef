"""Energies of different DFT settings differ by a constant per element; fitted here, and moved into a backbone."""

import warnings
from collections.abc import Sequence

import numpy as np
from ase import Atoms

LARGEST_RESIDUAL = 1.0  # eV per atom; more than this no pretrained potential is off


def fit_offsets(residuals: np.ndarray, structures: Sequence[Atoms]) -> dict[int, float]:
    """Least squares: the energy per atom of each element that explains residuals (label - prediction, eV) best.

    Where the compositions leave it open (all structures are SiO2, say), the smallest offsets are taken. A residual
    that is NaN, a missing label, does not count.
    """
    elements = sorted({int(number) for atoms in structures for number in atoms.numbers})
    counts = np.array([[np.count_nonzero(atoms.numbers == number) for number in elements] for atoms in structures])
    labelled = np.isfinite(residuals)
    if not labelled.any():
        return {}
    per_atom = counts.sum(1)[labelled]
    # each structure counts the same, whatever its size
    matrix, target = counts[labelled] / per_atom[:, None], residuals[labelled] / per_atom
    solution, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    rest = float(np.sqrt(np.mean((matrix @ solution - target) ** 2)))
    if rest > LARGEST_RESIDUAL:
        warnings.warn(
            f"after fitting an energy per element, energies and predictions still differ by {rest:.1f} eV/atom "
            "(root mean square): are the energies in eV?",
            stacklevel=2,
        )
    return dict(zip(elements, solution.tolist(), strict=True))
