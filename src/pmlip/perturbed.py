"""Any torch module with noise at its sites, whose samples are functions."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmlip import checkpoint
from pmlip.backbones.base import Backbone
from pmlip.noise import draws
from pmlip.noise.injection import Site, inject, noisy_layers, vanish_with_input
from pmlip.noise.source import Noise
from pmlip.samples import tensors


class Perturbed(nn.Module):
    """Any module with noise at its sites: `model(*args, noise=e)` is the sample that e names.

    noise (noise,) is one sample of one system. For a batch, noise (system, noise) with
    rows={kind: system of each row} for the kinds of rows that the sites name; None instead of an index says that
    the leading axes of the layers' inputs are the systems. noise=None is z = 0.
    """

    def __init__(self, backbone: nn.Module, sites: tuple[Site, ...], noise_dim: int) -> None:
        super().__init__()
        self.origin = checkpoint.Origin.of(backbone)
        self.sites = sites
        self.noise = Noise(noise_dim).to(next(backbone.parameters()))
        self.backbone = copy.deepcopy(backbone)
        # the sites of a potential are named as in its package's own model
        inject(self.backbone.module if isinstance(self.backbone, Backbone) else self.backbone, self.noise, sites)

    @property
    def trained(self) -> bool:
        """Whether any noise weight has left zero."""
        return any(bool(layer.noise_weight.any()) for layer in noisy_layers(self.backbone))

    def noise_parameters(self) -> list[nn.Parameter]:
        """W_z and the noise weights of all sites, without the backbone's own parameters."""
        return [self.noise.w_z, *(layer.noise_weight for layer in noisy_layers(self.backbone))]

    @torch.no_grad()
    def randomise(self, std: float | Sequence[float], *, seed: int = 0) -> None:
        """Give all noise weights random values of this size, or each layer's of its own: a spread without training.

        W_z stays as it is.
        """
        generator, layers = torch.Generator().manual_seed(seed), list(noisy_layers(self.backbone))
        sizes = std if isinstance(std, Sequence) else [std] * len(layers)
        for layer, size in zip(layers, sizes, strict=True):
            weight = layer.noise_weight
            weight.copy_(size * torch.randn(weight.shape, generator=generator))

    def draw(self, samples: int, *, seed: int = 0, kind: str = "plain") -> Tensor:
        """The standard normal e of each sample, (sample, noise); see `pmlip.noise.draw` for the kinds."""
        return draws.draw(samples, self.noise.dim, seed=seed, kind=kind)

    def forward(
        self,
        *args: Any,
        noise: Tensor | None = None,
        rows: Mapping[str, Tensor | None] | None = None,
        **kwargs: Any,
    ) -> Any:
        self.noise.set_draw(noise, rows)
        try:
            outputs = self.backbone(*args, **kwargs)
            if noise is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._put_in_force_again(outputs)
        finally:
            self.noise.set_draw(None)
        return outputs

    def _put_in_force_again(self, outputs: Any) -> None:
        """During the backward pass of `outputs` their noise is in force: activation checkpointing runs layers again."""
        draw, rows = self.noise.draw, self.noise.rows

        def put_back(_: Tensor) -> None:
            self.noise.set_draw(draw, rows)
            # the engine's own callback for the end of a backward pass, which DDP relies on too
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self.noise.set_draw, None))

        for output in tensors(outputs):
            if output.requires_grad:
                output.register_hook(put_back)

    def fold(self, *, sample: int, seed: int = 0, kind: str = "plain") -> nn.Module:
        """Sample number `sample` as a plain module of the backbone's own class, with its own state-dict keys.

        A linear layer without a bias gets one, and a layer of e3nn, which has none, stays a small wrapper.
        """
        if sample < 0:
            raise ValueError(f"samples are numbered from 0, got sample={sample}")
        copied = copy.deepcopy(self)
        copied.noise.set_draw(copied.draw(sample + 1, seed=seed, kind=kind)[sample])
        for layer in list(noisy_layers(copied.backbone)):
            layer.fold()
        return copied.backbone

    def stored_settings(self) -> dict[str, Any]:
        """What its file needs to make it again, besides the backbone."""
        sites = [
            {"name": site.name, "rows": site.rows, "custom_envelope": site.envelope not in (None, vanish_with_input)}
            for site in self.sites
        ]
        return {"noise_dim": self.noise.dim, "sites": sites}

    def save(self, path: str | Path) -> None:
        """Write the model to one file, atomically; `pmlip.load` reads it."""
        checkpoint.write(path, origin=self.origin, settings=self.stored_settings(), state=self.state_dict())
