"""What training, evaluation and benchmarks ask of a potential with an uncertainty; they never ask which one it is."""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from torch import Tensor, nn

from pmlip import checkpoint
from pmlip.backbones.base import Backbone, Graph
from pmlip.methods._chunks import ChunkSize, run_in_chunks
from pmlip.samples import UNTRAINED, Outputs, Samples
from pmlip.structures.atoms import StructureError, as_structures, system_index

Progress = Callable[[int, int], None]
USUAL_SAMPLES = 16  # where no number is asked for
FIXED_ATOMS = 512  # in a pass, where a run must give the very same numbers each time: how work is cut shows in rounding
ATOMS_IN_A_PASS = 128  # of the methods whose noise belongs to rows


class Method(nn.Module, ABC):
    """A potential that gives samples. What tells one sample from another, its draw, is a row of a tensor."""

    backbone: Backbone
    trains_on_samples = False  # whether its loss is of K samples, where a draw of zeros is no noise; otherwise of one
    fixed_samples: int | None = None  # how many samples there are, where that is not free
    one_pass = False  # whether one pass through the network gives all samples of a structure, and their mean
    origin: checkpoint.Origin  # the backbone it was made from
    record: dict[str, Any]  # how it was trained and calibrated, for its file

    @abstractmethod
    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        """What tells the samples apart, (sample, ...)."""

    @abstractmethod
    def draw_for_training(self, samples: int, systems: int, generator: torch.Generator) -> Tensor:
        """The same for a training step, (sample, ...)."""

    @abstractmethod
    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        """Outputs with the sample axis first; None: one sample, without noise."""

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write everything to one file, whole or not at all; `pmlip.load` reads it."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What it was made with, besides the backbone."""

    @property
    def trained(self) -> bool:
        """Whether its spread means anything."""
        return True

    def conformal_for(self, samples: int) -> float | None:
        """Forces lie within mean ± this times sigma as often as a calibration promised; None without one.

        It promised so for its number of samples; a spread of fewer is noisier.
        """
        calibration = self.record.get("calibration", {})
        factor: float | None = calibration.get("conformal")
        return factor if samples >= calibration.get("samples", 0) else None

    def new_parameters(self) -> list[nn.Parameter]:
        """The parameters that the backbone does not have; they start from nothing and learn faster."""
        return []

    def responses(self, structures: Sequence[Atoms]) -> list[float]:
        """How strongly forces respond to what the new parameters do, where that is asked for below."""
        return []

    def rate_for_new(self, responses: Sequence[float], error: float) -> float:
        """A learning rate for these; error: mean absolute error of the forces before fine-tuning, in eV/Å."""
        return 5e-4

    @property
    def usual_start(self) -> float:
        """The spread to start with where none is asked for, as a share of the error."""
        return 0.0

    def start_at_random(self, spread: float, responses: Sequence[float], *, balance: float, seed: int) -> None:
        """Before training: a random spread of the forces of this size, in eV/Å.

        balance: how far the layers where noise enters have the same part in it, from 0 to 1.
        """
        raise ValueError(f"{type(self).__name__} has no noise weights that could start at random, so start must be 0")

    def energy_parameters(self) -> list[nn.Parameter]:
        """More new parameters, in eV per atom: they move the zero of a sample's energies."""
        return []

    def fit_energy_zero(self, structures: Sequence[Atoms], *, curved: bool = True) -> None:
        """Let samples agree about the zero of the energies; curved: where no training follows, as well as can be."""

    def parts(self) -> Sequence["Method"]:
        """What is trained one after the other, each with a seed of its own."""
        return [self]

    needs_validation = False  # whether `finish` cannot do without validation data

    def finish(self, valid: Sequence[Atoms]) -> None:
        """What is left to do after training, on validation data."""

    def penalty(self) -> Tensor | None:
        """What the loss holds besides the score of the samples, for the last call of `forward`."""
        return None

    def watched(self) -> dict[str, float]:
        """Numbers of the last call of `forward` that are worth a line in the log of a training."""
        return {}

    def member(self, number: int, *, seed: int = 0) -> Backbone:
        """Sample `number` of this seed as an ordinary potential, where a sample is one."""
        raise ValueError(
            f"a sample of {type(self).__name__} is no potential: its noise belongs to the rows of a batch, so there is "
            "no function to hand out"
        )

    calibrated_at_end = False  # whether its spread is scaled to validation data after training

    def scale_spread(self, factor: float) -> None:
        """Make the spread larger or smaller by about this factor; the prediction without noise stays as it is."""
        self._scale_spread(factor)
        if factor != 1:
            self.record.pop("calibration", None)  # its intervals were for the spread as it was

    def _scale_spread(self, factor: float) -> None:
        raise ValueError(f"the spread of {type(self).__name__} cannot be scaled after training")

    def check_spread(self) -> None:
        """Refuse to be asked for an uncertainty where there is none."""
        if self.fixed_samples == 1:
            raise ValueError("this model gives one answer and no spread; use model.backbone.calculator()")
        if not self.trained:
            raise ValueError(UNTRAINED)

    def spread_samples(self, samples: int) -> int:
        """How many samples to take for a spread when so many are asked for; refuses what gives none."""
        self.check_spread()
        count = self.fixed_samples or samples
        if count < 2:
            raise ValueError(f"a spread needs at least 2 samples, got samples={samples}")
        return count

    def sample(
        self,
        structures: Atoms | Iterable[Atoms],
        *,
        samples: int | None = None,
        seed: int = 0,
        chunk_atoms: int | None = None,
        progress: Progress | None = None,
    ) -> Samples:
        """K samples for each structure, on the CPU: by default 16, or as many as there are.

        chunk_atoms: how many atoms (times samples) to put through one pass; found by trial when it is not given.
        progress(done, all) is told how many structures are done.
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
        """What `sample` gives, and the mean over all noise as far as it can be told: the best single answer.

        The mean of K samples is off by spread / sqrt(K), most of that because their draws do not average to zero.
        Where a sample is a function of its draw, two more passes take that part away. On average the result is the
        mean over all noise, and it is as smooth a function of the positions as a sample is.
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

    def counterweights(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """More draws, and the weights with which their samples are added to the mean of those of `draws`."""
        return draws[:0], torch.zeros(0)

    def passes(self, samples: int) -> int:
        """Of a structure through the network, for so many samples and their mean."""
        return 1 if self.one_pass else samples + len(self.counterweights(self.draw(samples))[0])

    def predict(self, structures: Atoms | Iterable[Atoms], *, chunk_atoms: int | None = None) -> Outputs:
        """The prediction without noise: one pass, no spread."""
        listed = as_structures(structures)
        outputs = self._run(listed, None, chunk_atoms)
        return Outputs({name: value[0] for name, value in outputs.items()}, system_index(listed))

    def _count(self, samples: int | None) -> int:
        return (self.fixed_samples or USUAL_SAMPLES) if samples is None else samples

    def _samples(
        self, structures: Atoms | Iterable[Atoms], draws: Tensor, chunk_atoms: int | None, progress: Progress | None
    ) -> Samples:
        listed = as_structures(structures)
        return Samples(self._run(listed, draws, chunk_atoms, progress), system_index(listed), trained=self.trained)

    def _run(
        self,
        structures: list[Atoms],
        draws: Tensor | None,
        chunk_atoms: int | None,
        progress: Progress | None = None,
    ) -> dict[str, Tensor]:
        if chunk_atoms is not None and chunk_atoms < 1:
            raise ValueError(f"a chunk must hold at least 1 atom, got chunk_atoms={chunk_atoms}")
        noise = torch.zeros(1) if draws is None else draws
        chunk = self._chunk(len(noise)) if chunk_atoms is None else ChunkSize(chunk_atoms, settled=True)

        def build(start: int, stop: int) -> tuple[int, Graph]:
            try:
                return start, self.backbone.graph(structures[start:stop])
            except StructureError as error:
                raise error.after(start) from None

        def forward(group: tuple[int, Graph], piece: Tensor) -> dict[str, Tensor]:
            start, graph = group
            own = None if draws is None else self._draws_of(start, piece)
            return {name: value.cpu() for name, value in self(graph, own).items()}

        with evaluating(self), torch.no_grad():
            outputs = run_in_chunks(
                build,
                forward,
                sizes=[len(atoms) for atoms in structures],
                noise=noise,
                chunk=chunk,
                progress=progress,
            )
        _refuse_non_finite(outputs, structures)
        return outputs

    def _draws_of(self, start: int, draws: Tensor) -> Tensor:
        """The draws for a group of structures that begins with number `start` of those given."""
        return draws

    def _chunk(self, samples: int) -> ChunkSize:
        """What has been found out about the device the backbone is on."""
        known: dict[torch.device, ChunkSize] = self.__dict__.setdefault("_chunks", {})
        return known.setdefault(next(self.parameters()).device, ChunkSize())


class StoredMethod(Method):
    """A method whose file holds its name, the options it was made with, and its weights."""

    name: str  # of its module

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.origin = checkpoint.Origin.of(backbone)
        self.record: dict[str, Any] = {}

    def settings(self) -> dict[str, Any]:
        return {}

    def save(self, path: str | Path) -> None:
        settings = {"method": self.name, "options": self.settings()}
        checkpoint.write(path, origin=self.origin, settings=settings, state=self.state_dict(), record=self.record)


class WrappedMethod(StoredMethod):
    """A method around a copy of a backbone, with noise that belongs to rows if it has any.

    The same structures in the same order have the same samples for a seed.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.backbone = copy.deepcopy(backbone)

    def draw(self, samples: int, *, seed: int = 0) -> Tensor:
        """One number per sample to seed a generator with."""
        if samples < 1:
            raise ValueError(f"at least 1 sample is needed, got samples={samples}")
        return torch.randint(2**62, (samples,), generator=torch.Generator().manual_seed(seed))

    def draw_for_training(self, samples: int, systems: int, generator: torch.Generator) -> Tensor:
        return torch.randint(2**62, (samples,), generator=generator)

    def _draws_of(self, start: int, draws: Tensor) -> Tensor:
        return draws + start  # otherwise all groups would have the same noise

    def _chunk(self, samples: int) -> ChunkSize:
        # which structures share a pass decides what noise they get, so it must not depend on how fast a machine is
        return ChunkSize(ATOMS_IN_A_PASS * samples, settled=True)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; each submodule's own mode again afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _refuse_non_finite(outputs: Mapping[str, Tensor], structures: list[Atoms]) -> None:
    # the stress of a structure without a cell is NaN by definition
    system = system_index(structures)
    for name, where in (("energy", torch.arange(len(structures))), ("forces", system)):
        bad = (~outputs[name].isfinite()).nonzero()
        if len(bad):
            sample, row = bad[0][:2].tolist()
            index = int(where[row])
            raise StructureError(
                structures[index],
                index,
                f"the predicted {name} of sample {sample} is NaN or infinite; are atoms on top of each other, or did "
                "the training diverge?",
            )


def each_sample(run: Any, draws: Tensor) -> dict[str, Tensor]:
    """run(generator) for each seed in `draws`, the results stacked along a new first axis."""
    outputs = [run(torch.Generator().manual_seed(int(number))) for number in draws]
    return {name: torch.stack([output[name] for output in outputs]) for name in outputs[0]}


@contextlib.contextmanager
def seeded(generator: torch.Generator | None) -> Iterator[None]:
    """What torch draws inside, on the CPU, follows from this generator, and outside nothing changes; None: it does not.

    So layers need no generator of their own, which they could not take into a compiled network.
    """
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        yield
