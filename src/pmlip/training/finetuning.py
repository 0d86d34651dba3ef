"""Fine-tuning: one plain loop. It is deterministic, goes on where it was stopped, and runs on one process or many."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor, nn

from pmlip import losses
from pmlip.memory import is_out_of_memory
from pmlip.methods.base import FIXED_ATOMS, Method
from pmlip.noise.draws import SEED_OF_FIT
from pmlip.structures.atoms import as_structures, subsample
from pmlip.structures.labels import check_labels, fingerprint, labels
from pmlip.structures.rotation import random_rotation, rotated
from pmlip.training.baseline import check_validation, prepare
from pmlip.training.config import FinetuneConfig
from pmlip.training.distributed import of_first, sum_gradients
from pmlip.training.objective import Objective
from pmlip.training.optimiser import Optimiser
from pmlip.training.run_state import (
    STATE_FILE,
    folder_of_part,
    read_state,
    refuse_state_of_another_kind,
    uninterrupted,
    write_state,
)

if TYPE_CHECKING:  # it takes seconds to import
    from lightning_fabric import Fabric

DEFAULT_ERROR = 0.05  # eV/Å, of forces that are not learned from
ZERO_SHARE = 0.01  # of the error of the energies before: what the zero of a sample's energies may move in a step
STRUCTURES_FOR_ZERO = 2  # what all have in common, a few show
STRUCTURES_FOR_OFFSETS, SAMPLES_FOR_OFFSETS = 64, 32
SAVE_EVERY = 60.0  # seconds between two saves of the state of a run


@dataclass(frozen=True)
class Finetuned:
    """How a run went; of a model of several parts, how that of its first part did, but for the costs."""

    steps: int
    passes: int  # structures times samples that went through the network and back
    validation: dict[str, float]  # scores of what was kept: "valid", and by label; empty without a validation set
    offsets: dict[int, float]  # eV per atom of each element, moved into the backbone's references
    scales: dict[str, float]  # mean absolute error of each label before fine-tuning
    noise_rate: float  # learning rate of what came with the method
    log: list[dict[str, float]] = field(repr=False)
    seconds: float = 0.0


def finetune(
    model: Method,
    train: Atoms | Sequence[Atoms],
    *,
    valid: Sequence[Atoms] | None = None,
    config: FinetuneConfig | None = None,
    folder: str | Path | None = None,
    fabric: "Fabric | None" = None,
    progress: Callable[[int, int, Mapping[str, float]], None] | None = None,
) -> Finetuned:
    """Fine-tune a model in place on structures with labels.

    Each label's term of the loss is measured in units of its error before fine-tuning, so that energies do not
    drown forces or the other way round. Kept are the averaged weights with the best validation score (without a
    validation set, the last). With a folder, the state of the run lives there in `last.pt`: called again with the
    same data and settings, an interrupted run goes on and ends where it would have ended. `progress(step, steps,
    latest)` is called after every step.
    """
    config = config or FinetuneConfig()
    listed, held_out = as_structures(train), as_structures(valid) if valid else []
    check_labels(listed, config.learned, missing=config.missing)
    if held_out:
        check_validation(held_out, config)
    if model.trains_on_samples and config.samples < 2:
        raise ValueError(f"a spread is learned from at least 2 samples, got samples={config.samples}")
    if model.needs_validation and not held_out:
        raise ValueError("this method fits its widths to validation data, and none were given")
    if fabric is None:
        from lightning_fabric import Fabric

        device = next(model.parameters()).device
        fabric = Fabric(accelerator=device.type, devices=1 if device.index is None else [device.index])
    model.record = {"config": asdict(config)}  # nothing of how the model was before
    runs: list[Finetuned] = []
    parts = model.parts()
    if folder:
        refuse_state_of_another_kind(Path(folder), parts=len(parts))
    for number, part in enumerate(parts):

        def show(step: int, steps: int, latest: Mapping[str, float], before: int = number) -> None:
            if progress:
                progress(before * steps + step, len(parts) * steps, latest)

        place = folder_of_part(Path(folder), number, parts=len(parts)) if folder else None
        own = replace(config, seed=config.seed * len(parts) + number)  # no two seeds share a part
        runs.append(_Run(part, listed, held_out, own, place, fabric).to_the_end(show))
    model.finish(held_out)
    return replace(runs[0], **{name: sum(getattr(run, name) for run in runs) for name in ("seconds", "passes")})


def seconds_per_step(model: Method, train: Sequence[Atoms], config: FinetuneConfig, fabric: "Fabric") -> float:
    """How long a step takes, the second one: the first pays for what happens once. The model stays as it is."""
    part = copy.deepcopy(model.parts()[0])
    some = subsample(train, 8 * config.batch)  # their errors are measured first, which takes long for many
    run = _Run(part, some, [], replace(config, offsets=False), None, fabric)
    part.train()
    run._train_step()
    began = time.perf_counter()
    run._train_step()
    return time.perf_counter() - began


class _Run:
    """One fine-tuning, from its start or from where it was stopped."""

    def __init__(
        self,
        model: Method,
        train: list[Atoms],
        valid: list[Atoms],
        config: FinetuneConfig,
        folder: Path | None,
        fabric: "Fabric",
    ) -> None:
        self.model, self.train, self.valid, self.config, self.fabric = model, train, valid, config, fabric
        self.state_file = folder / STATE_FILE if folder else None
        self.steps = config.steps_for(len(train))
        self.rotate = not model.backbone.equivariant if config.rotate is None else config.rotate
        model.to(fabric.device)
        self.step, self.best, self.worse, self.log, self.spent = 0, math.inf, 0, list[dict[str, float]](), 0.0
        self.best_state: dict[str, Tensor] = {}
        made_from = {"method": type(model).__name__, "origin": asdict(model.origin), "settings": model.settings()}
        self.identity: dict[str, Any] = {"model": made_from, "config": asdict(config)}
        self.identity |= {"train": fingerprint(train), "valid": fingerprint(valid)}
        stored = read_state(self.state_file, self.identity) if self.state_file else None
        stored = of_first(stored, fabric)  # others may have no access to its files
        if stored:
            self.offsets, self.scales, self.noise_rate = stored["offsets"], stored["scales"], stored["noise_rate"]
        else:
            self.offsets, self.scales = prepare(model, train, config)
            error = self.scales.get("forces", DEFAULT_ERROR)
            start = self.model.usual_start if config.start is None else config.start
            responses = self.model.responses(train) if start or config.noise_rate is None else []
            self.noise_rate = float(
                f"{config.noise_rate or self.model.rate_for_new(responses, error):.2g}"
            )  # as printed
            if start:
                self.model.start_at_random(start * error, responses, balance=config.balance, seed=config.seed)
                self._fit_energy_zero(curved=False)  # what training makes of the curvature, steps do not follow
            if fabric.world_size > 1:  # sums on a GPU differ in their last digits, and rates are rounded
                measured = of_first((self.offsets, self.scales, self.noise_rate), fabric)
                self.offsets, self.scales, self.noise_rate = measured
                model.load_state_dict(of_first({name: x.cpu() for name, x in model.state_dict().items()}, fabric))
        self.objective = Objective(model, config, self.scales, fabric)
        self.optimiser = Optimiser(self._rates(), config, steps=self.steps)
        if stored:
            self._restore(stored)

    def _rates(self) -> list[tuple[list[nn.Parameter], float]]:
        """What is trained, and how fast."""
        new, zero = self.model.new_parameters(), self.model.energy_parameters()
        ids = {id(parameter) for parameter in (*new, *zero)}
        own = [p for p in self.model.parameters() if id(p) not in ids and p.requires_grad]
        return [
            ([] if self.config.freeze_backbone else own, self.config.backbone_rate or self.model.backbone.rate),
            (new, self.noise_rate),
            (zero if "energy" in self.scales else [], ZERO_SHARE * self.scales.get("energy", 0.0)),
        ]

    def to_the_end(self, progress: Callable[[int, int, Mapping[str, float]], None]) -> Finetuned:
        began = saved = time.monotonic()
        spent = self.spent
        checkpoints = {
            math.ceil(self.steps * (k + 1) / self.config.validations) for k in range(self.config.validations)
        }
        if self.step:
            progress(self.step, self.steps, {})
        # no gradients for what is not trained
        trained = {id(parameter) for parameter in self.optimiser.parameters}
        frozen = [p for p in self.model.parameters() if p.requires_grad and id(p) not in trained]
        for parameter in frozen:
            parameter.requires_grad_(False)
        self.model.train()
        try:
            while self.step < self.steps and not self._out_of_patience:
                with uninterrupted():
                    latest = self._train_step()
                    self.step += 1
                    if self.valid and self.step in checkpoints:
                        latest |= self._validate()
                    self.spent = spent + time.monotonic() - began
                    self.log.append({"step": self.step, "seconds": round(self.spent, 3), **latest})
                progress(self.step, self.steps, latest)
                if time.monotonic() - saved > SAVE_EVERY or self.step in checkpoints:
                    self._save()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            self._save()
            raise
        finally:
            self.model.eval()
            for parameter in frozen:
                parameter.requires_grad_()
        self._save()
        if self.best_state:
            self.model.load_state_dict(self.best_state)
        else:
            self.optimiser.put(self.optimiser.averaged)
        validation = {name: value for name, value in self._best_line.items() if name.startswith("valid")}
        # a parabola moves the mean of the samples, which offsets mend
        if (self._fit_energy_zero(curved=self.config.offsets) | self._fit_offsets_again()) and self.valid:
            validation = self.objective.scores(self.valid, zero_counts=True)
        epochs, begun = divmod(self.step, math.ceil(len(self.train) / self.config.batch))
        passes = (epochs * len(self.train) + begun * self.config.batch) * self.objective.passes
        return Finetuned(
            self.step, passes, validation, self.offsets, self.scales, self.noise_rate, self.log, self.spent
        )

    def _fit_energy_zero(self, *, curved: bool) -> bool:
        """Whether there was one to be fitted."""
        fitted = "energy" in self.scales and bool(self.model.energy_parameters())
        if fitted:
            molecules = [atoms for atoms in self.train if len(atoms) > 1] or self.train  # no isolated atoms
            self.model.fit_energy_zero(subsample(molecules, STRUCTURES_FOR_ZERO), curved=curved)
        return fitted

    def _fit_offsets_again(self) -> bool:
        """The steps move all energies together by more than they differ from the labels. Whether there were any."""
        if not (self.config.offsets and "energy" in self.scales):
            return False
        labelled = [atoms for atoms in self.train if bool(labels([atoms]).energy.isfinite())]
        some = subsample(labelled, STRUCTURES_FOR_OFFSETS)
        count = self.model.fixed_samples or SAMPLES_FOR_OFFSETS
        _, mean = self.model.sample_with_mean(some, samples=count, seed=SEED_OF_FIT, chunk_atoms=FIXED_ATOMS)
        # one number for all elements: of a rare one these structures tell too little
        moved = float(((labels(some).energy - mean.energy.double()) / mean.atoms_per_system).mean())
        self.model.backbone.shift_all(moved)
        self.offsets = {number: offset + moved for number, offset in self.offsets.items()}
        return True

    @property
    def _best_line(self) -> dict[str, float]:
        """The line of the log about the weights that were kept."""
        return next((line for line in self.log if line.get("valid") == self.best), {})

    @property
    def _out_of_patience(self) -> bool:
        return self.config.patience is not None and self.worse >= self.config.patience

    def _train_step(self) -> dict[str, float]:
        config, size = self.config, len(self.train)
        per_epoch = math.ceil(size / config.batch)
        epoch, place = divmod(self.step, per_epoch)
        order = np.random.default_rng([config.seed, 1, epoch]).permutation(size)
        chosen = [self.train[i] for i in order[place * config.batch : (place + 1) * config.batch]]
        random = np.random.default_rng([config.seed, 2, self.step])
        if self.rotate:
            chosen = [rotated(atoms, random_rotation(random)) for atoms in chosen]
        # every process draws for the whole batch and takes its part, so their number changes nothing
        generator = torch.Generator().manual_seed(int(random.integers(2**62)))
        draws = self.objective.draw(len(chosen), generator)
        own = slice(self.fabric.global_rank, None, self.fabric.world_size)
        self.optimiser.zero_gradients()
        loss = None
        if chosen[own]:
            graph = self.model.backbone.graph(chosen[own])
            part = draws[:, own] if draws.dim() > 1 else draws
            try:
                objective = partial(self.objective.loss, chosen[own], chosen)
                loss = losses.backpropagate(partial(self.model, graph), part, objective, chunk=self.objective.chunk)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise MemoryError(
                    f"a step of {len(graph.rows['node'])} atoms with {config.samples} samples each does not fit into "
                    "memory; run the samples one by one with chunk=1, or use a smaller batch"
                ) from error
        else:
            self.objective.without_structures(chosen)
        sum_gradients(self.optimiser.parameters, self.fabric)
        terms = self.objective.summed(loss)
        norm = self.optimiser.step(self.step)
        latest = {f"train_{name}": value for name, value in terms.items()} | self.model.watched()
        return {"loss": self.objective.total(terms), **latest, "norm": norm}

    def _validate(self) -> dict[str, float]:
        """Score the averaged weights; keep them if none were better."""
        with self.optimiser.with_averaged_weights():
            scores = self.objective.scores(self.valid, zero_counts=not self.config.offsets)
            self.worse = 0 if scores["valid"] < self.best else self.worse + 1
            if scores["valid"] < self.best:
                self.best = scores["valid"]
                self.best_state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return scores

    def _save(self) -> None:
        if self.state_file is None or self.fabric.global_rank:
            return
        state = {
            "identity": self.identity,
            "offsets": self.offsets,
            "scales": self.scales,
            "noise_rate": self.noise_rate,
            "step": self.step,
            "seconds": self.spent,
            "best": self.best,
            "worse": self.worse,
            "log": self.log,
            "best_state": self.best_state,
            "model": self.model.state_dict(),
            **self.optimiser.state(),
        }
        write_state(self.state_file, state)

    def _restore(self, stored: dict[str, Any]) -> None:
        self.model.load_state_dict(stored["model"])
        self.optimiser.restore(stored)
        self.step, self.best, self.worse = stored["step"], stored["best"], stored["worse"]
        self.log, self.best_state, self.spent = stored["log"], stored["best_state"], stored["seconds"]
