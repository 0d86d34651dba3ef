"""Data-parallel training: a single process, or the processes started by torchrun."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Device and rank of this process, and the number of processes."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    count: int = 1

    @classmethod
    def start(cls, device: str) -> "Processes":
        """Join the process group if torchrun started this process; with device="cuda", each process has its own GPU.

        device: the device of a single process, or the type of device of all processes.
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls(torch.device(device))
        kind, _, index = device.partition(":")
        if index:
            raise ValueError(f"torchrun assigns a device to each process: pass device={kind!r}, not {device!r}")
        local = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(local)
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        return cls(local, distributed.get_rank(), count)

    def stop(self) -> None:
        """Leave the process group."""
        if self.count > 1:
            distributed.destroy_process_group()

    @property
    def share(self) -> slice:
        """The part of a batch that this process computes."""
        return slice(self.rank, None, self.count)

    def share_of_draws(self, draws: Tensor) -> Tensor:
        """The draws (sample, ...) with which this process computes its part of a batch.

        Draws (sample, system, ...) are split over the processes. Draws (sample,) seed the noise of all batch rows, so
        each process gets other seeds; zeros stand for no noise and stay zero.
        """
        return draws[:, self.share] if draws.dim() > 1 else draws + self.rank * (draws != 0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over all processes, in place."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def sum_terms(self, terms: dict[str, float]) -> dict[str, float]:
        """Loss terms summed over all processes."""
        if self.count == 1:
            return terms
        values = torch.tensor(list(terms.values()), dtype=torch.float64, device=self.device)
        distributed.all_reduce(values)
        return dict(zip(terms, values.tolist(), strict=True))

    def gather_batch(self, own: Tensor, size: int) -> Tensor:
        """Values (..., structure) of a whole batch of `size` structures, gathered from the shares of all processes.

        Gradients flow only to the values of this process. All processes must call this, even without structures.
        """
        if self.count == 1:
            return own
        longest = math.ceil(size / self.count)
        padded = functional.pad(own.detach(), (0, longest - own.shape[-1])).contiguous()
        gathered = [torch.empty_like(padded) for _ in range(self.count)]
        distributed.all_gather(gathered, padded)
        whole = torch.stack(gathered, -1).flatten(-2)[..., :size].clone()
        whole[..., self.share] = own
        return whole

    def broadcast(self, value: T) -> T:
        """The value of process 0, on every process."""
        if self.count == 1:
            return value
        holder = [value]
        distributed.broadcast_object_list(holder, src=0, device=self.device)
        return holder[0]
