"""What a method must do: `Method` gives samples of a potential, `Learner` is what training asks of it.

Evaluation, calculators and benchmarks use a `Method` and never ask which one it is; only training uses its `Learner`.
"""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from torch import Tensor, nn

from pmlip import checkpoint
from pmlip.backbones.base import Backbone, Graph
from pmlip.methods import _sampling
from pmlip.provenance import Calibration, History
from pmlip.samples import UNTRAINED, Outputs, Samples
from pmlip.structures.atoms import as_structures, system_index

Progress = Callable[[int, int], None]
USUAL_SAMPLES = 16  # where no number is asked for
FIXED_ATOMS = 512  # in a pass, where a run must give the very same numbers each time: batching changes rounding


class Method(nn.Module, ABC):
    """A potential that gives samples. A draw, one row of a tensor, tells one sample from another."""

    name: str  # of its module in `pmlip.methods`
    backbone: Backbone
    fixed_samples: int | None = None  # how many samples there are, where the number is not free
    one_pass = False  # whether one pass through the network gives all samples of a structure, and their mean
    row_noise = False  # whether noise is drawn per batch row: the same seed and structures, the same samples
    origin: checkpoint.Origin  # the backbone it was made from
    history: History | None = None  # how it was fine-tuned
    calibration: Calibration | None = None  # how its spread was scaled

    @abstractmethod
    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        """What tells the samples apart, (sample, ...)."""

    @abstractmethod
    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        """Outputs with the sample axis first; None: one sample, without noise."""

    @abstractmethod
    def learner(self) -> "Learner":
        """What training asks of it."""

    def settings(self) -> dict[str, Any]:
        """The options it was made with."""
        return {}

    def stored_settings(self) -> dict[str, Any]:
        """What its file needs to make it again, besides the backbone."""
        return {"method": self.name, "options": self.settings()}

    @property
    def trained(self) -> bool:
        """Whether its spread means anything."""
        return True

    def member(self, number: int, *, seed: int = 0) -> Backbone:
        """Sample `number` of this seed as an ordinary potential."""
        raise ValueError(f"samples of {self.name} cannot be exported: their noise is drawn per batch row")

    def counterweights(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """More draws, and the weights with which their samples are added to the sample mean of `draws`."""
        return draws[:0], torch.zeros(0)

    def _scale_spread(self, factor: float) -> None:
        raise ValueError(f"the spread of {self.name} cannot be scaled after training")

    # what follows is the same for all methods

    def scale_spread(self, factor: float) -> None:
        """Multiply the spread by about this factor; the prediction without noise stays the same."""
        self._scale_spread(factor)
        if factor != 1:
            self.calibration = None  # its intervals were for the spread before

    def spread_samples(self, samples: int) -> int:
        """The number of samples to take for a spread when `samples` are asked for; refuses a model without spread."""
        if self.fixed_samples == 1:
            raise ValueError("this model gives one answer and no spread; use model.backbone.calculator()")
        if not self.trained:
            raise ValueError(UNTRAINED)
        count = self.fixed_samples or samples
        if count < 2:
            raise ValueError(f"a spread needs at least 2 samples, got samples={samples}")
        return count

    def passes(self, samples: int) -> int:
        """Passes of a structure through the network for this many samples and their mean."""
        return 1 if self.one_pass else samples + len(self.counterweights(self.draw(samples))[0])

    def sample(
        self,
        structures: Atoms | Iterable[Atoms],
        *,
        samples: int | None = None,
        seed: int = 0,
        chunk_atoms: int | None = None,
        progress: Progress | None = None,
    ) -> Samples:
        """K samples for each structure, on the CPU; by default 16, or as many as the method has.

        chunk_atoms: how many atoms (times samples) go through one pass; by default the fastest number, found by trial.
        progress(done, total) counts structures.
        """
        return self._samples(structures, self.draw(self._count(samples), seed=seed), chunk_atoms, progress)

    def sample_with_mean(
        self,
        structures: Atoms | Iterable[Atoms],
        *,
        samples: int | None = None,
        seed: int = 0,
        chunk_atoms: int | None = None,
        progress: Progress | None = None,
    ) -> tuple[Samples, Outputs]:
        """K samples as from `sample`, and an estimate of the mean over all noise: the best single prediction.

        The mean of K samples is off by spread / sqrt(K), mostly because their draws do not average to zero. Two more
        passes remove that part where a sample is a function of its draw. The estimate is unbiased, and as smooth a
        function of the positions as a sample is.
        """
        listed = as_structures(structures)
        if self.one_pass:
            drawn = self.sample(listed, samples=samples, seed=seed, chunk_atoms=chunk_atoms, progress=progress)
            return drawn, self.predict(listed, chunk_atoms=chunk_atoms)
        draws = self.draw(count := self._count(samples), seed=seed)
        more, weights = self.counterweights(draws)
        outputs = self._samples(listed, torch.cat([draws, more]), chunk_atoms, progress)
        drawn = outputs.subset(count)
        corrected = {
            name: mean + torch.tensordot(weights.to(mean), outputs[name][count:], 1)
            for name, mean in drawn.mean.items()
        }
        return drawn, Outputs(corrected, drawn.system)

    def predict(self, structures: Atoms | Iterable[Atoms], *, chunk_atoms: int | None = None) -> Outputs:
        """The prediction without noise: one pass, no spread."""
        listed = as_structures(structures)
        outputs = self._run(listed, None, chunk_atoms)
        return Outputs({name: value[0] for name, value in outputs.items()}, system_index(listed))

    def save(self, path: str | Path) -> None:
        """Write the model to one file, atomically; `pmlip.load` reads it."""
        checkpoint.write(
            path,
            origin=self.origin,
            settings=self.stored_settings(),
            state=self.state_dict(),
            history=self.history,
            calibration=self.calibration,
        )

    def _count(self, samples: int | None) -> int:
        return (self.fixed_samples or USUAL_SAMPLES) if samples is None else samples

    def _samples(
        self, structures: Atoms | Iterable[Atoms], draws: Tensor, chunk_atoms: int | None, progress: Progress | None
    ) -> Samples:
        listed = as_structures(structures)
        outputs = self._run(listed, draws, chunk_atoms, progress)
        return Samples(outputs, system_index(listed), trained=self.trained)

    def _run(
        self,
        structures: list[Atoms],
        draws: Tensor | None,
        chunk_atoms: int | None,
        progress: Progress | None = None,
    ) -> dict[str, Tensor]:
        return _sampling.run(
            self,
            self.backbone,
            structures,
            draws,
            row_noise=self.row_noise,
            chunk_atoms=chunk_atoms,
            progress=progress,
        )


@dataclass(frozen=True, kw_only=True)
class Initialisation:
    """How the parameters that a method adds should start."""

    error: float  # eV/Å, MAE of the forces before fine-tuning
    start: float | None  # initial spread in units of that error; None: the method's default
    balance: float  # 1: equal spread per site, 0: equal weights
    rate: float | None  # learning rate of the new parameters; None: the method's default
    learns_energy: bool
    seed: int


class Learner:
    """What training asks of a method. This one trains a plain potential by its absolute error."""

    trains_on_samples = False  # whether the loss is the CRPS of K samples; otherwise of one
    needs_validation = False  # whether `fit_on_validation` cannot do without data
    calibrated_after = False  # whether `pmlip.calibrate` follows a fine-tuning

    def __init__(self, model: Method) -> None:
        self.model = model

    def parts(self) -> Sequence[Method]:
        """The models that are trained one after the other, each with its own seed."""
        return [self.model]

    def draw(self, samples: int, systems: int, generator: torch.Generator) -> Tensor:
        """Draws for a training step, (sample, ...); zeros stand for no noise."""
        return torch.randint(2**62, (samples,), generator=generator)

    def new_parameters(self) -> list[nn.Parameter]:
        """The parameters that the backbone does not have, with their own learning rate."""
        return []

    def energy_parameters(self) -> list[nn.Parameter]:
        """More new parameters, in eV per atom: energy offsets of the samples."""
        return []

    def initialise(self, structures: Sequence[Atoms], how: Initialisation) -> float:
        """Set the new parameters before the first step; gives their learning rate."""
        if how.start:
            raise ValueError(f"{self.model.name} has no noise weights to initialise at random; give start=0")
        return how.rate or 5e-4

    def penalty(self) -> Tensor | None:
        """A term of the loss besides the score of the samples, for the last call of `forward`."""
        return None

    def watched(self) -> dict[str, float]:
        """Numbers of the last call of `forward` for the training log."""
        return {}

    def fit_energy_zero(self, structures: Sequence[Atoms], *, curved: bool) -> bool:
        """Align the energy offsets of the samples after training; False where samples have none."""
        return False

    def fit_on_validation(self, valid: Sequence[Atoms]) -> None:
        """Fit what remains after training to validation data."""


class WrappedMethod(Method):
    """A method around a copy of a backbone, with noise, if any, drawn per batch row."""

    row_noise = True

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.origin = checkpoint.Origin.of(backbone)
        self.backbone = copy.deepcopy(backbone)

    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        """One number per sample, which seeds a generator."""
        if samples < 1:
            raise ValueError(f"at least 1 sample is needed, got samples={samples}")
        return torch.randint(2**62, (samples,), generator=torch.Generator().manual_seed(seed))

    def learner(self) -> Learner:
        return Learner(self)


@dataclass(frozen=True)
class BuiltFrom:
    """For a method that needs no training: what fine-tuned models it is built from."""

    method: str
    several: bool = False  # from models of several seeds, or from one


def each_sample(run: Callable[[torch.Generator], dict[str, Tensor]], draws: Tensor) -> dict[str, Tensor]:
    """run(generator) for each seed in `draws`, the results stacked along a new first axis."""
    outputs = [run(torch.Generator().manual_seed(int(number))) for number in draws]
    return {name: torch.stack([output[name] for output in outputs]) for name in outputs[0]}


@contextlib.contextmanager
def seeded(generator: torch.Generator | None) -> Iterator[None]:
    """Seeds torch's CPU generator inside the block; no-op if None.

    So layers need no generator of their own, which they could not take into a compiled network.
    """
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        yield
