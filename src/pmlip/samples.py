"""Outputs of a model for a batch of structures: a single prediction or K samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PER_ATOM = ("forces", "positions")  # outputs with one row per atom; all others have one row per system
SMALLEST_SPREAD = 1e-5  # eV/Å; a smaller spread is rounding error on a force that symmetry fixes

UNTRAINED = (
    "the noise of this model was never trained (all noise weights are zero), so its samples give no uncertainty; "
    "fine-tune it first, or use `predict`"
)


@dataclass(frozen=True, eq=False)
class Outputs(Mapping[str, Tensor]):
    """Named outputs of a batch: energy (system,) eV; forces (atom, 3) eV/Å; stress (system, 6) eV/Å^3, Voigt.

    Read as a mapping, `outputs["forces"]`, or by attribute, `outputs.forces`. The stress of a structure
    without a cell is NaN.
    """

    named: Mapping[str, Tensor]
    system: Tensor = field(repr=False)  # (atom,) index of the system each atom belongs to

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.named:
            raise KeyError(f"no output {name!r}; there are: {', '.join(self.named)}")
        return self.named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)

    @property
    def systems(self) -> int:
        return int(self.system[-1]) + 1

    @property
    def atoms_per_system(self) -> Tensor:  # (system,)
        return torch.bincount(self.system)

    @property
    def energy(self) -> Tensor:
        return self["energy"]

    @property
    def forces(self) -> Tensor:
        return self["forces"]

    @property
    def stress(self) -> Tensor:
        return self["stress"]

    @property
    def positions(self) -> Tensor:
        return self["positions"]


@dataclass(frozen=True, eq=False)
class Samples(Outputs):
    """K samples: the same outputs with the sample axis first, energy (sample, system) and so on."""

    trained: bool = True  # False if all noise weights are zero: the spread is then meaningless

    @property
    def count(self) -> int:
        return len(next(iter(self.named.values())))

    @property
    def mean(self) -> Outputs:
        """Mean over samples."""
        return Outputs({name: value.mean(0) for name, value in self.items()}, self.system)

    @property
    def spread(self) -> Outputs:
        """Standard deviation over samples (ddof = 1) of each entry."""
        if self.count < 2:
            raise ValueError(f"a spread needs at least 2 samples, got samples={self.count}")
        if not self.trained:
            raise ValueError(UNTRAINED)
        return Outputs({name: value.std(0) for name, value in self.items()}, self.system)

    def subset(self, samples: int) -> "Samples":
        """Return the first `samples` samples."""
        if not 1 <= samples <= self.count:
            raise ValueError(f"samples must be 1 to {self.count}, the number of samples here; got samples={samples}")
        return Samples({name: value[:samples] for name, value in self.items()}, self.system, trained=self.trained)

    def scaled(self, factor: float, *, energy: float | None = None, mean: Outputs | None = None) -> "Samples":
        """Multiply the spread by `factor`; energy: another factor for the energies.

        mean: the point about which samples are scaled; by default the mean of the samples.
        """
        mean = self.mean if mean is None else mean
        factors = dict.fromkeys(self, factor) | ({} if energy is None else {"energy": energy})
        named = {
            name: value if factors[name] == 1 else mean[name] + factors[name] * (value - mean[name])
            for name, value in self.items()
        }
        return Samples(named, self.system, trained=self.trained)


def mean_per_system(values: Tensor, system: Tensor, systems: int) -> Tensor:
    """Average a per-atom quantity (..., atom, component) over atoms and components of each system: (..., system)."""
    entries = values.mean(-1)
    total = entries.new_zeros(*entries.shape[:-1], systems).index_add_(-1, system, entries)
    return total / torch.bincount(system, minlength=systems)


def join(parts: Sequence[Mapping[str, Tensor]], *, axis: int) -> dict[str, Tensor]:
    """Concatenate named outputs along an axis: 0 for samples, 1 for systems or atoms."""
    return {name: torch.cat([part[name] for part in parts], dim=axis) for name in parts[0]}


def tensors(nested: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers and dataclasses."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from tensors(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from tensors(value)
    elif hasattr(nested, "__dict__"):
        yield from tensors(vars(nested))
