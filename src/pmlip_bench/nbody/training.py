"""Trains one method on one set of trajectories: AdamW or Muon, one-cycle learning rate, averaged weights."""

import copy
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pmlip.nbody.data import Trajectories
from pmlip.nbody.p_egnn import Method
from pmlip.perturbed import Perturbed
from pmlip_bench.nbody.muon import Muon

SMALLEST_MATRIX = 8  # fewest rows and columns for Muon; AdamW updates smaller matrices
COMPILE_FROM = 2000  # steps; compiling takes half a minute and saves a third of the time of each step


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a method is built and trained."""

    epochs: int = 150  # passes over a training set of 1000 trajectories
    shrink: float = 0.3  # with n trajectories there are epochs * (n / 1000)^-shrink passes
    batch: int = 100  # trajectories per step
    samples: tuple[int, int] = (4, 4)  # K in the first and second half of training, for methods that train on samples
    learning_rate: float = 2e-3  # peak of the one-cycle schedule
    weight_decay: float = 0.1
    decay_noise: bool = False  # apply weight decay to W_z and the noise weights too
    average: float = 0.998  # decay of the running mean of the weights, which becomes the model; 0: the last weights
    # stop early when more than this many validations in a row (of ten in a full training) do not improve the CRPS, and
    # keep the best weights; None: train to the end and keep the last weights
    patience: int | None = None
    clip: float = 1.0  # largest gradient norm; larger gradients are scaled down
    warm_up: float = 0.1  # fraction of the steps in which the learning rate rises
    orthogonal: bool = False  # train weight matrices with Muon instead of AdamW, with the same learning rate and decay
    # with this training size or more, use Muon and half the passes: Muon fits faster, and overfits only small sets
    many: int | None = None
    sharpness: float = 0.0  # radius of sharpness-aware steps (Foret et al. 2021), which take two passes; 0: off
    network: dict[str, Any] = field(default_factory=dict)  # changes to the default EGNNConfig
    options: dict[str, Any] = field(default_factory=dict)  # changes to the method's default options

    def at(self, size: int) -> "Recipe":
        """The recipe for a training set of this many trajectories."""
        if self.many is None or size < self.many:
            return replace(self, many=None)
        return replace(self, many=None, orthogonal=True, epochs=self.epochs // 2)

    def epochs_for(self, size: int) -> int:
        """Passes over a training set of this many trajectories."""
        return max(1, round(self.epochs * (size / 1000) ** -self.shrink))


class DivergedError(RuntimeError):
    """The loss or its gradient was NaN or infinite in most steps of an epoch."""


@dataclass(frozen=True)
class Training:
    method: Method  # with the averaged weights, the last or the best
    curve: list[dict[str, float]]  # epoch, training loss and the scores from `watch`
    seconds: float  # CPU time, so that other work on the machine does not count
    passes: int  # trajectories times samples, each a forward and a backward pass
    skipped: int  # steps without an update, because loss or gradient was not finite


def compile_network(method: Method) -> bool:
    """Compile the network of a method if there is a C++ compiler; return whether it was compiled."""
    if shutil.which("g++") is None:
        return False
    # the compiler's random numbers are slower than torch's
    method.get_submodule("network").compile(dynamic=False, options={"fallback_random": True})
    return True


def train(
    method: Method,
    data: Trajectories,
    recipe: Recipe,
    *,
    seed: int,
    epochs: int | None = None,
    watch: Callable[[Method], dict[str, float]] | None = None,
    points: int = 10,
) -> Training:
    """Train a method and return it with its training curve and cost.

    watch: returns validation scores; called `points` times during training, for the curve and for early stopping
    (`recipe.patience`). epochs: passes over the data; by default from the recipe.
    """
    if recipe.batch > len(data):
        raise ValueError(f"batch={recipe.batch} is larger than the training set of {len(data)} trajectories; lower it")
    if recipe.many is not None:
        raise ValueError(f"the recipe depends on the training size (many={recipe.many}); pass recipe.at(size) instead")
    if recipe.patience is not None and watch is None:
        raise ValueError(f"patience={recipe.patience} needs validation scores; pass watch, or set patience=None")
    if method.trains_on_samples and min(recipe.samples) < 2:
        raise ValueError(f"training with the CRPS needs at least 2 samples, got samples={recipe.samples}")
    generator = torch.Generator().manual_seed(seed)
    epochs = recipe.epochs_for(len(data)) if epochs is None else epochs
    steps = len(data) // recipe.batch
    optimizers = _optimizers(method, recipe)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            recipe.learning_rate,
            total_steps=epochs * steps,
            pct_start=recipe.warm_up,
            cycle_momentum="betas" in optimizer.defaults,
        )
        for optimizer in optimizers
    ]
    averaged = copy.deepcopy(method)
    if epochs * steps >= COMPILE_FROM:
        compile_network(method)
    best, best_crps, worse = averaged, math.inf, 0
    curve, done, passes, skipped, began = [], 0, 0, 0, time.process_time()
    for epoch in range(1, epochs + 1):
        samples = recipe.samples[2 * (epoch - 1) // epochs] if method.trains_on_samples else 1
        losses = []
        for index in torch.randperm(len(data), generator=generator)[: steps * recipe.batch].view(steps, -1):
            batch = data.select(index)
            loss = _gradient(method, batch, samples, generator, recipe)
            norm = nn.utils.clip_grad_norm_(method.parameters(), recipe.clip)
            if math.isfinite(loss) and math.isfinite(norm):
                for optimizer in optimizers:
                    optimizer.step()
                losses.append(loss)
            else:  # a draw of BLIP's weights can send a single particle to infinity
                skipped += 1
            for schedule in schedules:
                schedule.step()
            done += 1
            passes += len(batch) * samples * (2 if recipe.sharpness else 1)
            # average over fewer steps at first, so that the initial weights are soon forgotten
            _move_towards(averaged, method, 1 - min(recipe.average, done / (done + 50)))
        if 2 * len(losses) < steps:
            wrong = f"{steps - len(losses)} of {steps} steps of epoch {epoch} of {epochs}"
            raise DivergedError(f"the loss or its gradient was NaN or infinite in {wrong}; try a smaller learning rate")
        if epoch * points // epochs != (epoch - 1) * points // epochs:
            scores = watch(averaged) if watch else {}
            curve.append({"epoch": epoch, "loss": sum(losses) / len(losses), **scores})
            if recipe.patience is not None:
                if scores["crps"] < best_crps:
                    best, best_crps, worse = copy.deepcopy(averaged), scores["crps"], 0
                else:
                    worse += 1
                if worse > recipe.patience:
                    break
    return Training(best, curve, time.process_time() - began, passes, skipped)


def _gradient(method: Method, batch: Trajectories, samples: int, generator: torch.Generator, recipe: Recipe) -> float:
    """Compute the gradient of the loss into `.grad`, and return the loss.

    With sharpness, the gradient is taken at the point of the largest loss within that radius (to first order).
    """
    state = generator.get_state()
    method.zero_grad()
    loss = method.loss(batch, generator, samples)
    loss.backward()
    if recipe.sharpness:
        moved = [p for p in method.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in moved if p.grad is not None])
        ascent = [p.grad * (recipe.sharpness / (norm + 1e-12)) for p in moved if p.grad is not None]
        torch._foreach_add_([p.data for p in moved], ascent)
        generator.set_state(state)
        method.zero_grad()
        method.loss(batch, generator, samples).backward()
        torch._foreach_sub_([p.data for p in moved], ascent)
    return loss.item()


def _optimizers(method: Method, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for weight matrices if `recipe.orthogonal`."""
    noise = {id(p) for part in method.modules() if isinstance(part, Perturbed) for p in part.noise_parameters()}
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter in method.parameters():
        decay = recipe.weight_decay if recipe.decay_noise or id(parameter) not in noise else 0.0
        matrix = recipe.orthogonal and parameter.dim() == 2 and min(parameter.shape) >= SMALLEST_MATRIX
        groups.setdefault((matrix, decay), []).append(parameter)

    def listed(matrices: bool) -> list[dict[str, object]]:
        return [{"params": own, "weight_decay": decay} for (matrix, decay), own in groups.items() if matrix == matrices]

    # the one-cycle schedule varies the first beta between 0.85 and 0.95
    adamw = torch.optim.AdamW(listed(False), lr=recipe.learning_rate, betas=(0.95, 0.99))
    return [adamw, Muon(matrices, lr=recipe.learning_rate)] if (matrices := listed(True)) else [adamw]


@torch.no_grad()
def _move_towards(averaged: nn.Module, method: nn.Module, share: float) -> None:
    for mean, parameter in zip(averaged.parameters(), method.parameters(), strict=True):
        mean.lerp_(parameter, share)
