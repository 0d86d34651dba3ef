"""A perturbed module without an adapter, which processes that tests start can import too."""

import os

import torch
import torch.distributed
from torch import nn

import pmlip
from conftest import randomise_noise


class MLP(nn.Module):
    """A module without an adapter; its second block begins with a norm and a dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 8))
        self.second = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.second(self.first(x))


def make(kind=MLP, *, noise_dim=4, **options):
    torch.manual_seed(0)
    return randomise_noise(pmlip.perturb(kind().double(), noise_dim=noise_dim, sites=["first", "second"]), **options)


X = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ddp_worker(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = make()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    half = slice(3 * rank, 3 * rank + 3)
    wrapped(X[half], noise=model.draw(2)[rank]).square().mean().backward()
    if rank == 0:
        torch.save([parameter.grad for parameter in model.parameters()], f"{folder}/gradients.pt")
    torch.distributed.barrier()
    os._exit(0)  # torch 2.13 can deadlock when it takes a gloo group and its reducer down
