"""The training loop: deterministic, resumable, on one or several processes."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor, nn

from pmlip import losses
from pmlip.backbones.base import weights_hash
from pmlip.checkpoint import DAMAGES
from pmlip.errors import first_reason
from pmlip.limits import LAST_SEED
from pmlip.locks import locked_file
from pmlip.memory import is_out_of_memory
from pmlip.methods._tangents import add_tangents
from pmlip.methods.base import FIXED_ATOMS, Initialisation, Method
from pmlip.noise.draws import SEED_OF_FIT
from pmlip.structures.atoms import Progress, as_structures, subsample
from pmlip.structures.energy_offsets import NOTHING, compositions, without_isolated
from pmlip.structures.labels import check_labels, fingerprint, labels
from pmlip.structures.rotation import random_rotation
from pmlip.training.baseline import check_validation, fit_offsets_and_measure_errors
from pmlip.training.batches import LabelledStructures
from pmlip.training.config import FinetuneConfig
from pmlip.training.distributed import Processes
from pmlip.training.objective import Objective
from pmlip.training.optimiser import Optimiser
from pmlip.training.result import Finetuned
from pmlip.training.run_state import (
    STATE_FILE,
    folder_of_part,
    read_state,
    refuse_state_of_another_kind,
    uninterrupted,
    write_state,
)

DEFAULT_ERROR = 0.05  # eV/Å, force error to assume if forces are not trained on
ZERO_SHARE = 0.01  # learning rate of the sample energy offsets, relative to the energy error before fine-tuning
STRUCTURES_FOR_OFFSETS, SAMPLES_FOR_OFFSETS = 64, 32
SAVE_EVERY = 60.0  # seconds between saves of the run state


def finetune(
    model: Method,
    train: Atoms | Sequence[Atoms],
    *,
    valid: Sequence[Atoms] | None = None,
    config: FinetuneConfig | None = None,
    folder: str | Path | None = None,
    references: Mapping[int, float] = NOTHING,
    processes: Processes | None = None,
    progress: Callable[[int, int, Mapping[str, float]], None] | None = None,
    fitting: Progress | None = None,
) -> Finetuned:
    """Fine-tune a model in place on structures with labels.

    references: energy (eV) of an isolated atom of each element, by atomic number. Isolated atoms in `train` are used
    for this only. Without them, energies per element are known only as far as the compositions determine them.

    The loss scales each label by its error before fine-tuning, which balances energies and forces. The averaged weights
    with the best validation score are kept (without validation data, the last ones). `progress(step, steps, latest)` is
    called after every step, and `fitting(done, total)` after every structure of the fit of tangent samples.

    If `folder` is given, the run saves its state there in `last.pt`. To resume an interrupted run, call it again with
    the same data, the same settings, and a model with the same initial weights, for example newly made from the same
    backbone. It then ends with the same weights. The interrupted run has changed its model, so do not pass that one.
    """
    config = config or FinetuneConfig()
    learner = model.learner()
    structures, isolated = without_isolated(as_structures(train))
    if not structures:
        raise ValueError("there is nothing to train on: all training structures are isolated atoms")
    references = {**isolated, **references}
    data = LabelledStructures(structures)
    check_labels(data.structures, data.labels, config.learned, missing=config.missing)
    held_out = LabelledStructures(without_isolated(as_structures(valid))[0]) if valid else None
    if held_out:
        check_validation(held_out, config)
    if learner.trains_on_samples and config.samples < 2:
        raise ValueError(f"a spread is learned from at least 2 samples, got samples={config.samples}")
    if learner.needs_validation and not held_out:
        raise ValueError("this method fits its widths to validation data; pass structures as valid=...")
    processes = processes or Processes(next(model.parameters()).device)
    model.history = model.calibration = None  # they describe the weights before this run
    model.training_features = {}
    learner.forget_tangents()
    runs: list[Finetuned] = []
    parts = learner.parts()
    if folder:
        refuse_state_of_another_kind(Path(folder), parts=len(parts))
    # process 0 writes the state for all; the folder itself may be locked for more than the training
    with locked_file(Path(folder) / STATE_FILE) if folder and not processes.rank else contextlib.nullcontext():
        for number, part in enumerate(parts):

            def show(step: int, steps: int, latest: Mapping[str, float], before: int = number) -> None:
                if progress:
                    progress(before * steps + step, len(parts) * steps, latest)

            part_folder = folder_of_part(Path(folder), number, parts=len(parts)) if folder else None
            # unique for each pair of seed and part, for all seeds below 2^32 / parts
            own = replace(config, seed=(config.seed * len(parts) + number) % (LAST_SEED + 1))
            runs.append(_Run(part, data, held_out, own, part_folder, processes, references).to_the_end(show))
    done = replace(runs[0], **{name: sum(getattr(run, name) for run in runs) for name in ("seconds", "passes")})
    labelled = [structures[i] for i in data.labels.energy.isfinite().nonzero().flatten().tolist()]
    model.history = replace(done.history(config), compositions=compositions(labelled))
    if config.tangent:
        add_tangents(model, data.structures, progress=fitting)
    if held_out:
        learner.fit_on_validation(held_out.structures, train=data.structures)
    return replace(done, seconds=model.history.seconds, passes=model.history.passes)


def seconds_per_step(model: Method, train: Sequence[Atoms], config: FinetuneConfig, processes: Processes) -> float:
    """Return the duration of the second training step; the first step includes one-time costs.

    The model does not change.
    """
    part = copy.deepcopy(model.learner().parts()[0])
    some = LabelledStructures(subsample(train, 8 * config.batch))  # measuring the errors of all structures takes long
    run = _Run(part, some, None, replace(config, offsets=False), None, processes)
    with run.training():
        run._train_step()
        began = time.perf_counter()
        run._train_step()
        return time.perf_counter() - began


class _Run:
    """One fine-tuning run, new or resumed."""

    def __init__(
        self,
        model: Method,
        train: LabelledStructures,
        valid: LabelledStructures | None,
        config: FinetuneConfig,
        folder: Path | None,
        processes: Processes,
        references: Mapping[int, float] = NOTHING,
    ) -> None:
        self.model, self.train, self.valid, self.config, self.processes = model, train, valid, config, processes
        self.references = references
        self.learner = model.learner()
        self.state_file = folder / STATE_FILE if folder else None
        self.steps = config.steps_for(len(train))
        self.rotate = not model.backbone.equivariant if config.rotate is None else config.rotate
        model.to(processes.device)
        # a structure that the potential cannot take must stop a run now, not in an hour
        if self.rotate:
            model.backbone.check(train.structures, range(len(train)))
        else:
            train.build_graphs(model.backbone)
        if valid:
            model.backbone.check(valid.structures, range(len(valid)))
        self.step, self.best, self.validations_without_improvement = 0, math.inf, 0
        self.log, self.spent = list[dict[str, float]](), 0.0
        self.best_state: dict[str, Tensor] = {}
        self.identity = self._identity()
        stored = read_state(self.state_file, self.identity) if self.state_file else None
        stored = processes.broadcast(stored)  # other machines may not see this file
        if stored:
            self.offsets, self.scales, self.noise_rate = stored["offsets"], stored["scales"], stored["noise_rate"]
        else:
            self._prepare()
        self.objective = Objective(model, config, self.scales, processes)
        self.optimiser = Optimiser(model, self._rates(), config, steps=self.steps)
        if stored:
            try:
                self._restore(stored)
            except DAMAGES as error:
                raise ValueError(
                    f"{self.state_file} does not fit this model: {first_reason(error)}; remove it to start again"
                ) from error

    def _identity(self) -> dict[str, Any]:
        """Everything that must be unchanged for a run to resume."""
        model, train, valid = self.model, self.train, self.valid
        made_from = {"method": type(model).__name__, "origin": asdict(model.origin), "settings": model.settings()}
        made_from["weights"] = weights_hash(model.backbone)  # two models of one origin can differ
        return {
            "model": made_from,
            "config": asdict(self.config),
            "train": fingerprint(train.structures, train.labels),
            "valid": fingerprint(valid.structures, valid.labels) if valid else fingerprint([]),
            **({"references": dict(self.references)} if self.references else {}),
        }

    def _prepare(self) -> None:
        """Fit energy offsets, measure the errors, and initialise the parameters that the method adds."""
        self.offsets, self.scales = fit_offsets_and_measure_errors(self.model, self.train, self.config, self.references)
        how = Initialisation(
            error=self.scales.get("forces", DEFAULT_ERROR),
            start=self.config.start,
            balance=self.config.balance,
            rate=self.config.noise_rate,
            learns_energy="energy" in self.scales,
            seed=self.config.seed,
        )
        self.noise_rate = float(
            f"{self.learner.initialise(self.train.structures, how):.2g}"
        )  # rounded, so that the printed value reproduces the run
        if self.processes.count > 1:  # sums on a GPU are not bitwise reproducible
            measured = (self.offsets, self.scales, self.noise_rate)
            self.offsets, self.scales, self.noise_rate = self.processes.broadcast(measured)
            state = {name: x.cpu() for name, x in self.model.state_dict().items()}
            self.model.load_state_dict(self.processes.broadcast(state))

    def _rates(self) -> list[tuple[list[nn.Parameter], float]]:
        """Groups of trained parameters and their learning rates."""
        new, zero = self.learner.new_parameters(), self.learner.energy_parameters()
        ids = {id(parameter) for parameter in (*new, *zero)}
        own = [p for p in self.model.parameters() if id(p) not in ids and p.requires_grad]
        return [
            ([] if self.config.freeze_backbone else own, self.config.backbone_rate or self.model.backbone.rate),
            (new, self.noise_rate),
            (zero if "energy" in self.scales else [], ZERO_SHARE * self.scales.get("energy", 0.0)),
        ]

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Training mode inside the block, without gradients of the parameters that are not trained."""
        trained = {id(parameter) for parameter in self.optimiser.parameters}
        frozen = [p for p in self.model.parameters() if p.requires_grad and id(p) not in trained]
        for parameter in frozen:
            parameter.requires_grad_(False)
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()
            for parameter in frozen:
                parameter.requires_grad_()

    def to_the_end(self, progress: Callable[[int, int, Mapping[str, float]], None]) -> Finetuned:
        began = saved = time.monotonic()
        spent = self.spent
        validation_steps = {
            math.ceil(self.steps * (k + 1) / self.config.validations) for k in range(self.config.validations)
        }
        if self.step:
            progress(self.step, self.steps, {})
        try:
            with self.training():
                while self.step < self.steps and not self._out_of_patience:
                    with uninterrupted():
                        latest = self._train_step()
                        self.step += 1
                        if self.valid and self.step in validation_steps:
                            latest |= self._validate()
                        self.spent = spent + time.monotonic() - began
                        self.log.append({"step": self.step, "seconds": round(self.spent, 3), **latest})
                    progress(self.step, self.steps, latest)
                    if time.monotonic() - saved > SAVE_EVERY or self.step in validation_steps:
                        self._save()
                        saved = time.monotonic()
        except KeyboardInterrupt:
            self._save()
            raise
        self._save()
        self.model.load_state_dict(self.best_state or self.optimiser.averaged.state_dict())
        validation = self._fit_energies()
        epochs, begun = divmod(self.step, math.ceil(len(self.train) / self.config.batch))
        passes = (epochs * len(self.train) + begun * self.config.batch) * self.objective.passes
        return Finetuned(
            self.step, passes, validation, self.offsets, self.scales, self.noise_rate, self.log, self.spent
        )

    def _fit_energies(self) -> dict[str, float]:
        """Fit the energy offsets of samples and elements to the kept weights; returns the validation scores."""
        best = next((line for line in self.log if line.get("valid") == self.best), {})
        validation = {name: value for name, value in best.items() if name.startswith("valid")}
        if "energy" not in self.scales:
            return validation
        # The curvature shifts the sample mean. Only the offset fit below corrects this shift, so fit the curvature only
        # with offsets.
        fitted = self.learner.fit_energy_zero(self.train.structures, curved=self.config.offsets)
        if self.config.offsets:
            self._fit_offsets_again()
        changed = fitted or self.config.offsets
        return self._scores(self.model, common_error_counts=True) if changed and self.valid else validation

    def _fit_offsets_again(self) -> None:
        """Correct the mean energy error of the kept weights with one offset per atom.

        Training shifts all energies together by more than their other errors.
        """
        labelled = [self.train.structures[i] for i in self.train.labels.energy.isfinite().nonzero().flatten().tolist()]
        some = subsample(labelled, STRUCTURES_FOR_OFFSETS)
        count = self.model.fixed_samples or SAMPLES_FOR_OFFSETS
        _, mean = self.model.sample_with_mean(some, samples=count, seed=SEED_OF_FIT, chunk_atoms=FIXED_ATOMS)
        # one offset for all elements: so few structures do not determine the offset of a rare element
        shift = float(((labels(some).energy - mean.energy.double()) / mean.atoms_per_system).mean())
        self.model.backbone.shift_all(shift)
        self.offsets = {number: offset + shift for number, offset in self.offsets.items()}

    @property
    def _out_of_patience(self) -> bool:
        return self.config.patience is not None and self.validations_without_improvement >= self.config.patience

    def _train_step(self) -> dict[str, float]:
        config, size = self.config, len(self.train)
        per_epoch = math.ceil(size / config.batch)
        epoch, batch_number = divmod(self.step, per_epoch)
        order = np.random.default_rng([config.seed, 1, epoch]).permutation(size)
        chosen = order[batch_number * config.batch : (batch_number + 1) * config.batch].tolist()
        random = np.random.default_rng([config.seed, 2, self.step])
        data = self.train
        if self.rotate:
            data = data.rotated(chosen, [random_rotation(random) for _ in chosen])
            chosen = list(range(len(chosen)))
        # Every process draws for the whole batch and uses its share. Results then do not depend on the number of
        # processes, unless the method draws its noise per batch row.
        generator = torch.Generator().manual_seed(int(random.integers(2**62)))
        draws = self.objective.draw(len(chosen), generator)
        share, batch_labels = chosen[self.processes.share], data.labels_of(chosen)
        self.optimiser.zero_gradients()
        loss = None
        if share:
            batch = data.batch(self.model.backbone, share)
            own_draws = self.processes.share_of_draws(draws)
            try:
                objective = partial(self.objective.loss, batch.labels, batch_labels)
                loss = losses.backpropagate(
                    partial(self.model, batch.graph), own_draws, objective, chunk=self.objective.chunk
                )
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                samples = self.objective.samples
                split = "run the samples one by one with chunk=1, or " if samples > 1 and config.chunk != 1 else ""
                raise MemoryError(
                    f"a step of {len(batch.graph.rows['node'])} atoms with {samples} sample{'s' * (samples > 1)} each "
                    f"does not fit in memory; {split}lower the batch size with batch=..."
                ) from error
        else:
            self.objective.without_structures(batch_labels)
        self.processes.sum_gradients(self.optimiser.parameters)
        terms = self.objective.summed(loss)
        norm = self.optimiser.step(self.step)
        latest = {f"train_{name}": value for name, value in terms.items()} | self.learner.watched()
        return {"loss": self.objective.total(terms), **latest, "norm": norm}

    def _scores(self, model: Method, *, common_error_counts: bool) -> dict[str, float]:
        assert self.valid is not None
        share = list(range(len(self.valid)))[self.processes.share]
        own_labels = self.valid.labels_of(share) if share else None
        return self.objective.scores(
            model, self.valid.structures, own_labels, self.valid.labels, common_error_counts=common_error_counts
        )

    def _validate(self) -> dict[str, float]:
        """Score the averaged weights on the validation data; keep a copy if they are the best so far."""
        averaged = self.optimiser.averaged
        assert isinstance(averaged, Method)
        scores = self._scores(averaged, common_error_counts=not self.config.offsets)
        self.validations_without_improvement += 1
        if scores["valid"] < self.best:
            self.validations_without_improvement = 0
            self.best = scores["valid"]
            self.best_state = {name: value.detach().clone() for name, value in averaged.state_dict().items()}
        return scores

    def _save(self) -> None:
        if self.state_file is None or self.processes.rank:
            return
        state = {
            "identity": self.identity,
            "offsets": self.offsets,
            "scales": self.scales,
            "noise_rate": self.noise_rate,
            "step": self.step,
            "seconds": self.spent,
            "best": self.best,
            "worse": self.validations_without_improvement,
            "log": self.log,
            "best_state": self.best_state,
            "model": self.model.state_dict(),
            **self.optimiser.state(),
        }
        write_state(self.state_file, state)

    def _restore(self, stored: dict[str, Any]) -> None:
        self.model.load_state_dict(stored["model"])
        self.optimiser.restore(stored)
        self.step, self.best = stored["step"], stored["best"]
        self.validations_without_improvement = stored["worse"]
        self.log, self.best_state, self.spent = stored["log"], stored["best_state"], stored["seconds"]
