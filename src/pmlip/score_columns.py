"""The per-row arrays from which every metric is computed: errors, spreads and scores of one output.

This file alone defines which entries count:
- an entry counts if its label and its prediction are finite;
- an entry varies if its spread is above zero (forces: above SMALLEST_SPREAD; symmetry fixes the others);
- rows `atoms` and `structures` exist only for forces, if every force has a label and the model has a spread or novelty;
- one sample, or an untrained model, has no spread.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pmlip import metrics, scores
from pmlip.novelty import Novelty
from pmlip.samples import PER_ATOM, SMALLEST_SPREAD, Outputs, Samples, mean_per_system


@dataclass(frozen=True)
class Rows:
    """Arrays with one row per entry, atom or structure."""

    system: np.ndarray  # (row,) the structure of each row
    arrays: Mapping[str, np.ndarray]  # name -> (row, ...)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __len__(self) -> int:
        return len(self.system)

    def where(self, mask: np.ndarray) -> "Rows":
        return Rows(self.system[mask], {name: array[mask] for name, array in self.arrays.items()})


def rankable(values: np.ndarray) -> np.ndarray:
    """The values with infinity replaced by the largest finite number, which has the same rank."""
    return np.nan_to_num(values, posinf=np.finfo(float).max)


NOTHING = Rows(np.zeros(0, dtype=int), {})


class Columns:
    """The rows of one output, in double precision; energies are per atom. Each array is computed once."""

    def __init__(
        self,
        output: str,
        drawn: Samples,
        *,
        expected: Outputs,
        point: Outputs,
        target: Outputs,
        crps: Tensor | None = None,
        novelty: Novelty | None = None,
    ) -> None:
        """crps: CRPS per entry; None: the fair CRPS of the samples. novelty: None if it is unknown."""
        self.output = output
        self.system = drawn.system
        self.systems = drawn.systems
        self.count = drawn.count
        self.has_spread = drawn.count > 1 and drawn.trained
        self._divisor: Tensor | int = target.atoms_per_system if output == "energy" else 1
        self._expected, self._point, self._crps = expected, point, crps
        self._novelty = novelty if output == "forces" else None
        self.samples = drawn[output].double() / self._divisor  # (sample, system or atom, ...)
        self.label = target[output].double() / self._divisor
        self.mean = self.samples.mean(0)

    @cached_property
    def spread(self) -> Tensor:
        """Standard deviation over samples, in the shape of the label; zero if the model has no spread."""
        return self.samples.std(0) if self.has_spread else torch.zeros_like(self.mean)

    @cached_property
    def sigma(self) -> Tensor:
        """Expected standard deviation of the error of the sample mean: `metrics.predictive_sigma` of the spread."""
        return math.sqrt(1 + 1 / self.count) * self.spread

    @cached_property
    def labelled(self) -> bool:
        return bool(self.label.isfinite().any())

    @cached_property
    def present(self) -> Tensor:
        """Mask of the entries that count, in the shape of the label."""
        return self.label.isfinite() & self.mean.isfinite()

    @cached_property
    def varying(self) -> Tensor:
        """Mask of the entries that count and have a spread, in the shape of the label."""
        return self.present & (self.spread > (SMALLEST_SPREAD if self.output == "forces" else 0))

    @cached_property
    def entries(self) -> Rows:
        """Label, errors, spread and CRPS of each component that counts."""
        arrays = {
            "label": self.label,
            "error": self.mean - self.label,
            "expected_error": self._expected[self.output].double() / self._divisor - self.label,
            "point_error": self._point[self.output].double() / self._divisor - self.label,
            "crps": scores.fair_crps(self.samples, self.label) if self._crps is None else self._crps,
        }
        if self.has_spread:
            arrays |= {"spread": self.spread, "sigma": self.sigma}
        if self._novelty is not None and not bool(self._novelty.sigma.isnan().any()):
            arrays["one_pass_sigma"] = self._novelty.sigma[:, None].expand(-1, 3)
        chosen = {name: array[self.present].numpy() for name, array in arrays.items()}
        return Rows(self._system_of_entries[self.present].numpy(), chosen)

    @cached_property
    def varying_entries(self) -> Rows:
        """The entries with a spread; `covered` is 1 where the label lies in the 95 % interval."""
        if not bool(self.varying.any()):
            return NOTHING
        rows = self.entries.where(self.varying[self.present].numpy())
        covered = metrics.covered(rows["error"], rows["spread"], np.zeros(len(rows)), self.count)
        return Rows(rows.system, {**rows.arrays, "covered": covered.astype(float)})

    @cached_property
    def atoms(self) -> Rows:
        """Norms of the force error, force spread and force of each atom."""
        if not self._ranked:
            return NOTHING
        vectors = {"error": self.mean - self.label, "force": self.mean}
        if self.has_spread:
            vectors["spread"] = self.spread
        arrays = {name: torch.linalg.vector_norm(vector, dim=-1).numpy() for name, vector in vectors.items()}
        if self._novelty is not None:
            arrays["novelty"] = rankable(self._novelty.atom.numpy())
        return Rows(self.system.numpy(), arrays)

    @cached_property
    def varying_atoms(self) -> Rows:
        """The atoms of structures with at least one force that varies."""
        return self.atoms.where(np.isin(self.atoms.system, self.system[self.varying.any(-1)].numpy()))

    @cached_property
    def structures(self) -> Rows:
        """Root mean square force error, spread and force of each structure, and statistics of its samples."""
        if not self._ranked:
            return NOTHING
        arrays = {"error": self.structure_error, "force": self.structure_force}
        if self._novelty is not None:
            arrays["novelty"] = rankable(self._novelty.structure.numpy())
        if not self.has_spread:
            return Rows(np.arange(self.systems), arrays)
        arrays["spread"] = self.structure_spread
        if self.count > 3:
            arrays["swapped_square_error"], arrays["swapped_variance"] = self._each_sample_as_truth()
        if bool(self.varying.any()):
            arrays["directions"] = metrics.effective_directions_per_system(self.samples, self.system)
        return Rows(np.arange(self.systems), arrays)

    @cached_property
    def structure_error(self) -> np.ndarray:
        """Root mean square force error of each structure; NaN where a label is missing."""
        return self._root_mean_square(self.mean - self.label)

    @cached_property
    def structure_spread(self) -> np.ndarray:
        return self._root_mean_square(self.spread)

    @cached_property
    def structure_force(self) -> np.ndarray:
        return self._root_mean_square(self.mean)

    @cached_property
    def _ranked(self) -> bool:
        ranking = self.has_spread or self._novelty is not None
        return self.output == "forces" and ranking and bool(self.present.all())

    @cached_property
    def _system_of_entries(self) -> Tensor:
        rows = self.system if self.output in PER_ATOM else torch.arange(self.systems)
        return rows.reshape(-1, *[1] * (self.label.dim() - 1)).expand_as(self.label)

    def _root_mean_square(self, values: Tensor) -> np.ndarray:
        found: np.ndarray = mean_per_system(values.square(), self.system, self.systems).sqrt().numpy()
        return found

    def _each_sample_as_truth(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean square error and variance of each structure, (structure, sample), with one sample as the label.

        The other samples are the prediction. This gives the scores of a perfectly calibrated model.
        """
        total, squares = self.samples.sum(0), self.samples.square().sum(0)
        square_errors, variances = [], []
        others = self.count - 1
        for truth in self.samples:
            mean = (total - truth) / others
            variance = (squares - truth.square() - others * mean.square()) / (others - 1)
            square_errors.append(mean_per_system((mean - truth).square(), self.system, self.systems).numpy())
            variances.append(mean_per_system(variance, self.system, self.systems).numpy())
        return np.stack(square_errors, 1), np.stack(variances, 1)
