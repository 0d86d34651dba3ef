"""The steps of a fine-tuning: AdamW with a rate for each group of parameters, and the running mean of the weights."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pmlip.training.config import FinetuneConfig


class Optimiser:
    """All that changes the weights; what is kept of a run is their running mean.

    rates: parameters and the largest learning rate they will have.
    """

    def __init__(
        self, rates: Sequence[tuple[Sequence[nn.Parameter], float]], config: FinetuneConfig, *, steps: int
    ) -> None:
        self.config, self.steps = config, steps
        self.parameters = [parameter for parameters, _ in rates for parameter in parameters]
        if not self.parameters:
            raise ValueError("there is nothing to train: the backbone is frozen, and this method adds no parameters")
        self.averaged = [parameter.detach().clone() for parameter in self.parameters]
        groups = [{"params": parameters, "lr": rate, "rate": rate} for parameters, rate in rates if parameters]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, config.second_moment), weight_decay=0.0)

    def zero_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self, number: int) -> float:
        """Take step `number` of a run, counted from 0, down the gradients; the norm these had before it was clipped.

        With gradients that are no numbers no step is taken: the weights are still those with which a run can go on.
        """
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.clip))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of step {number + 1} is NaN or infinite; use smaller rates, or look for atoms on top "
                "of each other"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self._share_of_rate(number) * group["rate"]
        self.optimizer.step()
        # early on the mean is over few steps, so that the start is soon forgotten
        share = 1 - min(self.config.average, (number + 1) / (number + 10))
        torch._foreach_lerp_(self.averaged, [parameter.detach() for parameter in self.parameters], share)
        return norm

    def _share_of_rate(self, number: int) -> float:
        """Rates rise, then fall as a cosine."""
        rising = max(1, round(self.config.warm_up * self.steps))
        if number < rising:
            return (number + 1) / rising
        fallen = 0.5 * (1 - math.cos(math.pi * (number - rising) / max(1, self.steps - rising)))
        return 1 - (1 - self.config.last_rate) * fallen

    @contextlib.contextmanager
    def with_averaged_weights(self) -> Iterator[None]:
        """The running mean in place of the weights inside."""
        current = [parameter.detach().clone() for parameter in self.parameters]
        self.put(self.averaged)
        try:
            yield
        finally:
            self.put(current)

    @torch.no_grad()
    def put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    def state(self) -> dict[str, Any]:
        """What it takes to go on, besides the weights."""
        return {"averaged": self.averaged, "optimizer": self.optimizer.state_dict()}

    def restore(self, stored: dict[str, Any]) -> None:
        self.averaged = [value.to(mean.device) for value, mean in zip(stored["averaged"], self.averaged, strict=True)]
        self.optimizer.load_state_dict(stored["optimizer"])
