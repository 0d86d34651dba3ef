"""The uncertainty of any property computed with a potential: compute it with each sample."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase.calculators.calculator import Calculator

from pmlip.calculator import sample_calculator
from pmlip.loading import load
from pmlip.methods.base import Method


@dataclass(frozen=True)
class Propagated:
    """The values of a property for each sample, with their mean and spread."""

    values: np.ndarray  # (sample, ...)

    @property
    def mean(self) -> np.ndarray:
        return self.values.mean(0)

    @property
    def spread(self) -> np.ndarray:
        """Standard deviation over samples (ddof = 1)."""
        return self.values.std(0, ddof=1)

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.spread:.2g}" if self.values.ndim == 1 else f"{self.mean} ± {self.spread}"


def propagate(
    function: Callable[[Calculator], Any],
    model: Method | str | Path,
    *,
    samples: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Propagated:
    """Evaluate function(calculator) for each sample; returns its values with their mean and spread.

    Each sample is one consistent potential. The function takes an ASE calculator and returns a number or an array:
    energy differences, equations of state, elastic constants, phonons, MD averages. model: a model, or a model file
    that `pmlip.load` reads without further arguments. progress(done, total) counts samples.
    """
    model = model if isinstance(model, Method) else load(model)
    count = model.spread_samples(samples)
    values = []
    for k in range(count):
        values.append(np.asarray(function(sample_calculator(model, k, seed=seed)), dtype=float))
        if values[k].shape != values[0].shape:
            raise ValueError(
                f"the function gave shape {values[k].shape} for sample {k} and {values[0].shape} for sample 0; it must "
                "return the same shape for every sample"
            )
        if progress:
            progress(k + 1, count)
    return Propagated(np.stack(values))
