"""Interfaces of a method: `Method` draws samples of a potential, `Learner` connects it to training.

Evaluation, calculators and benchmarks use `Method` alone, whichever method it is; only training uses `Learner`.
"""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from ase import Atoms
from torch import Tensor, nn

from pmlip import checkpoint
from pmlip.backbones.base import Backbone, Graph
from pmlip.limits import check_sample_number, check_samples, check_seed
from pmlip.methods import _sampling
from pmlip.novelty import KINDS, Novelty, TrainingFeatures, default_kind, fit, rescale
from pmlip.provenance import Calibration, History
from pmlip.samples import UNTRAINED, Outputs, Samples
from pmlip.structures.atoms import Progress, as_structures, system_index

USUAL_SAMPLES = 16  # default number of samples
SKIPPED_AT_ONCE = 2**20  # random integers
FIXED_ATOMS = 512  # atoms per pass where results must be bitwise reproducible, since batching changes rounding


class Method(nn.Module, ABC):
    """A potential that gives samples. Each sample is identified by its draw, one row of a tensor."""

    name: str  # its module in `pmlip.methods`
    backbone: Backbone
    fixed_samples: int | None = None  # number of samples, if the method fixes it
    one_pass = False  # whether all samples come from one forward pass; `predict` then gives their exact mean
    in_turn = False  # whether a pass computes samples one after the other, so that its memory does not grow with K
    row_noise = False  # whether noise is drawn per batch row; then samples depend on all structures of a call
    origin: checkpoint.Origin  # the backbone it was made from
    history: History | None = None  # how it was fine-tuned
    calibration: Calibration | None = None  # how its spread was scaled
    training_features: Mapping[str, TrainingFeatures] = MappingProxyType({})  # kind of features -> for novelty

    @abstractmethod
    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        """One draw per sample, (sample, ...)."""

    def draw_number(self, number: int, *, seed: int = 0) -> Tensor:
        """The draw of sample `number` alone, (1, ...); subclasses that can do so leave out the samples before it."""
        if self.fixed_samples and number >= self.fixed_samples:
            raise ValueError(f"the samples of this model are numbered 0 to {self.fixed_samples - 1}, got {number=}")
        return self.draw(self.fixed_samples or number + 1, seed=seed)[number : number + 1]

    @abstractmethod
    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        """Outputs with the sample axis first; draws=None: one sample, without noise."""

    @abstractmethod
    def learner(self) -> "Learner":
        """The interface to training."""

    def settings(self) -> dict[str, Any]:
        """Options the method was made with."""
        return {}

    def stored_settings(self) -> dict[str, Any]:
        """Settings its file needs to rebuild it, besides the backbone."""
        return {"method": self.name, "options": self.settings()}

    @property
    def trained(self) -> bool:
        """Whether its spread was learned; a spread before training is meaningless."""
        return True

    @property
    def members_are_whole(self) -> bool:
        """Whether an ordinary potential can hold all of a sample; if not, `member` leaves out its tangent part."""
        return True

    def member(self, number: int, *, seed: int = 0) -> Backbone:
        """Sample `number` of this seed as an ordinary potential."""
        raise ValueError(f"samples of {self.name} cannot be exported: their noise is drawn per batch row")

    def counterweights(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Control variates: extra draws, and the weights with which their samples are added to the sample mean."""
        return draws[:0], torch.zeros(0)

    def _scale_spread(self, factor: float) -> None:
        raise ValueError(f"the spread of {self.name} cannot be scaled after training")

    # The following methods are the same in all subclasses.

    def scale_spread(self, factor: float) -> None:
        """Multiply the spread by about this factor; the prediction without noise stays the same."""
        self._scale_spread(factor)
        if factor != 1:
            self.calibration = None  # its intervals hold for the old spread

    def spread_samples(self, samples: int) -> int:
        """Number of samples to draw when `samples` are requested; raises ValueError if the model has no spread."""
        if self.fixed_samples == 1:
            raise ValueError(
                "this model predicts no spread, because it has a single sample; use a method with a spread, or "
                "model.backbone.calculator() for its predictions"
            )
        if not self.trained:
            raise ValueError(UNTRAINED)
        count = self.fixed_samples or samples
        if count < 2:
            raise ValueError(f"a spread needs at least 2 samples, got samples={samples}")
        check_samples(count)
        return count

    def prediction_samples(self, samples: int) -> int:
        """Number of samples to draw for a prediction; 0 if error bars come from novelty, in one pass."""
        if samples:
            return self.spread_samples(samples)
        self.require_training_features()
        return 0

    def passes(self, samples: int) -> int:
        """Forward passes per structure for this many samples and their mean."""
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
        """K samples for each structure, on the CPU; by default 16, or the number that the method fixes.

        chunk_atoms: atoms times samples per forward pass; by default tuned for speed at run time.
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

        The mean of K samples has an error of spread / sqrt(K), mostly because their draws do not average to zero. For
        P and its ensembles, two more passes per model remove this part of the error. The estimate is unbiased, and as
        smooth a function of the positions as each sample.
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
        """The prediction without noise, from one forward pass."""
        listed = as_structures(structures)
        outputs = self._run(listed, None, chunk_atoms)
        return Outputs({name: value[0] for name, value in outputs.items()}, system_index(listed))

    def fit_novelty(
        self,
        train: Sequence[Atoms],
        *,
        valid: Sequence[Atoms] = (),
        kinds: Sequence[str] = KINDS,
        progress: Progress | None = None,
    ) -> None:
        """Store what `novelty` needs: the features of the training structures, scaled on held-out structures.

        See `pmlip.novelty.fit`. progress(done, total) counts structures, once for each kind of features.
        """
        fitted = {kind: fit(self.backbone, train, valid=valid, kind=kind, progress=progress) for kind in kinds}
        self.training_features = {**self.training_features, **fitted}

    def rescale_novelty(self, valid: Sequence[Atoms], *, progress: Progress | None = None) -> None:
        """Fit the scale of novelty and its error bars to other held-out structures; see `pmlip.novelty.rescale`."""
        self.training_features = {
            kind: rescale(self.backbone, training, valid, progress=progress)
            for kind, training in self.training_features.items()
        }

    def novelty(
        self,
        structures: Atoms | Iterable[Atoms],
        *,
        kind: str | None = None,
        chunk_atoms: int | None = None,
        progress: Progress | None = None,
    ) -> Novelty:
        """How unusual each atom and structure is, compared with the training set, and one-pass error bars.

        kind: "gradients" or "latent", see `pmlip.novelty`. By default, conservative potentials use gradients. Other
        potentials use latent features, which need no backward pass, and measure structures above the 95 % quantile of
        held-out structures again by gradients. Without the features of both kinds, the stored kind is used.
        progress(done, total) counts structures.
        """
        listed = as_structures(structures)
        training = self._training_features(kind)
        found = _sampling.measure(self.backbone, listed, training, chunk_atoms=chunk_atoms, progress=progress)
        if kind is None and training.kind == "latent" and "gradients" in self.training_features:
            gradients = self.training_features["gradients"]
            return _sampling.measure_unusual(self.backbone, listed, found, gradients, chunk_atoms=chunk_atoms)
        return found

    def require_training_features(self) -> None:
        """Raise ValueError if novelty cannot be measured."""
        if not self.training_features:
            raise ValueError(
                "this model has no training features, so novelty cannot be measured; call model.fit_novelty with the "
                "structures it was trained on, or run pmlip novelty"
            )

    def _training_features(self, kind: str | None) -> TrainingFeatures:
        self.require_training_features()
        usual = default_kind(self.backbone)
        chosen = kind or (usual if usual in self.training_features else next(iter(self.training_features)))
        if chosen not in self.training_features:
            raise ValueError(f"kind must be one of {', '.join(self.training_features)}, got kind={chosen!r}")
        return self.training_features[chosen]

    def save(self, path: str | Path) -> None:
        """Write the model to one file, atomically; `pmlip.load` reads it."""
        checkpoint.write(
            path,
            origin=self.origin,
            settings=self.stored_settings(),
            state=self.state_dict(),
            history=self.history,
            calibration=self.calibration,
            training_features=self.training_features,
        )

    def _count(self, samples: int | None) -> int:
        if samples is None:
            return self.fixed_samples or USUAL_SAMPLES
        check_samples(samples)
        return samples

    def sample_number(self, number: int, structures: Atoms | Iterable[Atoms], *, seed: int = 0) -> Outputs:
        """The outputs of sample `number` of this seed alone."""
        check_sample_number(number)
        drawn = self._samples(structures, self.draw_number(number, seed=seed), None, None)
        return Outputs({name: value[0] for name, value in drawn.items()}, drawn.system)

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
            in_turn=self.in_turn,
            chunk_atoms=chunk_atoms,
            progress=progress,
        )


@dataclass(frozen=True, kw_only=True)
class Initialisation:
    """How to initialise the parameters that a method adds."""

    error: float  # eV/Å, force MAE before fine-tuning
    start: float | None  # initial spread in units of that error; None: the method's default
    balance: float  # 1: equal spread per site, 0: equal weights
    rate: float | None  # learning rate of the new parameters; None: the method's default
    learns_energy: bool
    seed: int


class Learner:
    """The interface of a method to training. This base class trains a plain potential on its absolute error."""

    trains_on_samples = False  # whether the loss is the CRPS of K samples; otherwise the absolute error of one
    needs_validation = False  # whether `fit_on_validation` requires data
    calibrated_after = False  # whether to run `pmlip.calibrate` after fine-tuning

    def __init__(self, model: Method) -> None:
        self.model = model

    def parts(self) -> Sequence[Method]:
        """The models to train one after the other, each with its own seed."""
        return [self.model]

    def draw(self, samples: int, systems: int, generator: torch.Generator) -> Tensor:
        """Draws for a training step, (sample, ...); zeros stand for no noise."""
        return torch.randint(2**62, (samples,), generator=generator)

    def new_parameters(self) -> list[nn.Parameter]:
        """Parameters that the method adds to the backbone; they have their own learning rate."""
        return []

    def energy_parameters(self) -> list[nn.Parameter]:
        """Added parameters that set the energy offsets of samples, in eV per atom."""
        return []

    def initialise(self, structures: Sequence[Atoms], how: Initialisation) -> float:
        """Initialise the added parameters before the first step; returns their learning rate."""
        if how.start:
            raise ValueError(f"{self.model.name} has no noise weights to initialise at random; give start=0")
        return how.rate or 5e-4

    def penalty(self) -> Tensor | None:
        """Extra loss term for the last call of `forward`; None if the loss is the score of the samples alone."""
        return None

    def watched(self) -> dict[str, float]:
        """Values of the last call of `forward` for the training log."""
        return {}

    def fit_energy_zero(self, structures: Sequence[Atoms], *, curved: bool) -> bool:
        """Align the energy offsets of the samples after training; returns False if samples have no offsets."""
        return False

    def fit_tangents(
        self, train: Sequence[Atoms], *, cover: str | None = None, progress: Progress | None = None
    ) -> bool:
        """Fit tangent samples to the forces of the training structures; returns False if the method has none."""
        return False

    def forget_tangents(self) -> None:
        """Remove tangent samples, because the weights they belong to will change."""

    def fit_on_validation(self, valid: Sequence[Atoms], *, train: Sequence[Atoms]) -> None:
        """Fit parameters that are not trained, such as widths, to validation data; train: the training structures."""


class WrappedMethod(Method):
    """A method around a copy of a backbone. Its noise, if any, is drawn per batch row."""

    row_noise = True

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.origin = checkpoint.Origin.of(backbone)
        self.backbone = copy.deepcopy(backbone)

    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        """One random integer per sample, which seeds a generator."""
        if samples < 1:
            raise ValueError(f"at least 1 sample is needed, got samples={samples}")
        check_seed(seed)
        return torch.randint(2**62, (samples,), generator=torch.Generator().manual_seed(seed))

    def draw_number(self, number: int, *, seed: int = 0) -> Tensor:
        if self.fixed_samples:
            return super().draw_number(number, seed=seed)
        check_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        for start in range(0, number, SKIPPED_AT_ONCE):
            torch.randint(2**62, (min(SKIPPED_AT_ONCE, number - start),), generator=generator)
        return torch.randint(2**62, (1,), generator=generator)

    def learner(self) -> Learner:
        return Learner(self)


@dataclass(frozen=True)
class BuiltFrom:
    """The fine-tuned models from which a method without its own training is built."""

    method: str
    several: bool = False  # whether it needs models of several seeds


def each_sample(run: Callable[[torch.Generator], dict[str, Tensor]], draws: Tensor) -> dict[str, Tensor]:
    """Results of run(generator) for each seed in `draws`, stacked along a new first axis."""
    outputs = [run(torch.Generator().manual_seed(int(number))) for number in draws]
    return {name: torch.stack([output[name] for output in outputs]) for name in outputs[0]}


@contextlib.contextmanager
def seeded(generator: torch.Generator | None) -> Iterator[None]:
    """Seed torch's CPU generator inside the block; no-op if None.

    Layers then need no generator argument, which a compiled network could not pass to them.
    """
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        yield
