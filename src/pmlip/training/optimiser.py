"""AdamW with a learning rate per parameter group, and a running average of the weights."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from pmlip.training.config import FinetuneConfig


class Optimiser:
    """Updates the weights of a model and their running average.

    rates: groups of parameters, each with its peak learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        rates: Sequence[tuple[Sequence[nn.Parameter], float]],
        config: FinetuneConfig,
        *,
        steps: int,
    ) -> None:
        self.config, self.steps = config, steps
        self.parameters = [parameter for parameters, _ in rates for parameter in parameters]
        if not self.parameters:
            raise ValueError(
                "nothing to train: the backbone is frozen and this method adds no parameters; use freeze_backbone=False"
            )
        self.model = model
        self._average = AveragedModel(model, multi_avg_fn=self._average_weights)
        self._average.n_averaged += 1  # the initial weights count; otherwise the first step would replace them
        groups = [{"params": parameters, "lr": rate, "rate": rate} for parameters, rate in rates if parameters]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, config.second_moment), weight_decay=0.0)

    @property
    def averaged(self) -> nn.Module:
        """The model with the running average of the weights."""
        return self._average.module

    def zero_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self, number: int) -> float:
        """Take step `number` of a run, counted from 0; returns the gradient norm before clipping.

        A non-finite gradient raises FloatingPointError before any weight changes, so that the run can resume.
        """
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.clip))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of step {number + 1} is NaN or infinite; lower the learning rates (backbone_rate=..., "
                "noise_rate=...), or remove structures with overlapping atoms"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self._schedule(number) * group["rate"]
        self.optimizer.step()
        self._average.update_parameters(self.model)
        return norm

    def _average_weights(self, averaged: Sequence[Tensor], current: Sequence[Tensor], steps: Tensor | int) -> None:
        """Exponential moving average; its decay is smaller at first, so that it soon forgets the initial weights."""
        share = 1 - min(self.config.average, int(steps) / (int(steps) + 9))
        torch._foreach_lerp_(list(averaged), list(current), share)

    def _schedule(self, number: int) -> float:
        """Learning rate relative to its peak: linear warm-up, then cosine decay to `last_rate`."""
        rising = max(1, round(self.config.warm_up * self.steps))
        if number < rising:
            return (number + 1) / rising
        fallen = 0.5 * (1 - math.cos(math.pi * (number - rising) / max(1, self.steps - rising)))
        return 1 - (1 - self.config.last_rate) * fallen

    def state(self) -> dict[str, Any]:
        """Optimiser state and averaged weights, to resume from; without the current weights."""
        return {"averaged": self._average.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, stored: dict[str, Any]) -> None:
        self._average.load_state_dict(stored["averaged"])
        self.optimizer.load_state_dict(stored["optimizer"])
