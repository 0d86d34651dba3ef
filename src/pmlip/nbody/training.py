"""Training of one method on one set of trajectories: AdamW, one cycle, averaged weights."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from pmlip.model import Perturbed
from pmlip.nbody.data import Trajectories
from pmlip.nbody.methods import Method


@dataclass(frozen=True, kw_only=True)
class Recipe:
    epochs: int = 300  # passes over the training set
    batch: int = 100  # trajectories in a step
    learning_rate: float = 2e-3  # at the top of the cycle
    weight_decay: float = 0.1
    decay_noise: bool = False  # whether weight decay acts on W_z and the noise weights too
    average: float = 0.998  # decay of the running mean of the weights, which is what is kept; 0 keeps the last weights
    clip: float = 1.0  # largest norm of the gradient
    warm_up: float = 0.1  # share of the steps in which the learning rate rises


@dataclass(frozen=True)
class Training:
    method: Method  # with the averaged weights
    curve: list[dict[str, float]]  # epoch, training loss, and what `watch` gave
    seconds: float
    passes: int  # trajectories through the network and back


def train(
    method: Method,
    data: Trajectories,
    recipe: Recipe,
    *,
    seed: int,
    watch: Callable[[Method], dict[str, float]] | None = None,
    points: int = 10,
) -> Training:
    """Train a method; `watch` judges it at `points` moments for the curve, and decides nothing."""
    if recipe.batch > len(data):
        raise ValueError(f"a batch of {recipe.batch} cannot be taken from {len(data)} trajectories")
    generator = torch.Generator().manual_seed(seed)
    steps = len(data) // recipe.batch
    optimizer = torch.optim.AdamW(_groups(method, recipe), lr=recipe.learning_rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.epochs * steps, pct_start=recipe.warm_up
    )
    averaged = copy.deepcopy(method)
    curve, done, began = [], 0, time.perf_counter()
    for epoch in range(1, recipe.epochs + 1):
        total = 0.0
        for index in torch.randperm(len(data), generator=generator)[: steps * recipe.batch].view(steps, -1):
            optimizer.zero_grad()
            loss = method.loss(data.select(index), generator)
            loss.backward()
            nn.utils.clip_grad_norm_(method.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
            done += 1
            total += loss.item()
            # early on the mean is over few steps, so that the start is soon forgotten
            _move_towards(averaged, method, 1 - min(recipe.average, done / (done + 50)))
        if epoch * points // recipe.epochs != (epoch - 1) * points // recipe.epochs:
            curve.append({"epoch": epoch, "loss": total / steps, **(watch(averaged) if watch else {})})
    seconds = time.perf_counter() - began
    return Training(averaged, curve, seconds, done * recipe.batch * method.training_samples)


def _groups(method: Method, recipe: Recipe) -> list[dict[str, object]]:
    noise = [p for part in method.modules() if isinstance(part, Perturbed) for p in part.noise_parameters()]
    of_noise = {id(parameter) for parameter in noise}
    others = [parameter for parameter in method.parameters() if id(parameter) not in of_noise]
    groups: list[dict[str, object]] = [{"params": others, "weight_decay": recipe.weight_decay}]
    if noise:
        groups.append({"params": noise, "weight_decay": recipe.weight_decay if recipe.decay_noise else 0.0})
    return groups


@torch.no_grad()
def _move_towards(averaged: nn.Module, method: nn.Module, share: float) -> None:
    for mean, parameter in zip(averaged.parameters(), method.parameters(), strict=True):
        mean.lerp_(parameter, share)
