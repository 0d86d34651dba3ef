"""The uncertainty of anything that is computed with a potential: compute it with each sample."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase.calculators.calculator import Calculator

from pmlip.loading import load
from pmlip.methods.base import Method


@dataclass(frozen=True)
class Propagated:
    """A property with its uncertainty: its value for each sample."""

    values: np.ndarray  # (sample, ...)

    @property
    def mean(self) -> np.ndarray:
        return self.values.mean(0)

    @property
    def spread(self) -> np.ndarray:
        """The standard deviation over samples (ddof = 1)."""
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
    """function(calculator) for each sample, each being one consistent potential: a number or an array with its spread.

    Energy differences, equations of state, elastic constants, phonons, averages over MD: whatever takes an ASE
    calculator. The model may be given as its file where `pmlip.load` needs nothing but that. progress(done, all) is
    told how many samples are done.
    """
    model = model if isinstance(model, Method) else load(model)
    count = model.spread_samples(samples)
    values = []
    for k in range(count):
        values.append(np.asarray(function(model.member(k, seed=seed).calculator()), dtype=float))
        if values[k].shape != values[0].shape:
            raise ValueError(
                f"the function gave shape {values[k].shape} for sample {k} and {values[0].shape} for sample 0; a "
                "spread needs the same for all"
            )
        if progress:
            progress(k + 1, count)
    return Propagated(np.stack(values))
