"""Wrap any torch module with noise, so that each draw defines one sample."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmlip import checkpoint
from pmlip.backbones.base import Backbone
from pmlip.limits import check_sample_number
from pmlip.noise import draws
from pmlip.noise.injection import Site, inject, noisy_layers, vanish_with_input
from pmlip.noise.source import Noise
from pmlip.samples import tensors


class Perturbed(nn.Module):
    """A module with noise at its sites: `model(*args, noise=e)` returns the sample of the draw e.

    For one system, noise is (noise,). For a batch, noise is (system, noise), and rows={kind: index} gives the system of
    each row for every kind of row that the sites use. An index of None means that the leading axes of the layers'
    inputs are the systems. noise=None sets z = 0.
    """

    def __init__(self, backbone: nn.Module, sites: tuple[Site, ...], noise_dim: int) -> None:
        super().__init__()
        self.origin = checkpoint.Origin.of(backbone)
        self.sites = sites
        self.noise = Noise(noise_dim).to(next(backbone.parameters()))
        self.backbone = copy.deepcopy(backbone)
        # site names of a backbone are relative to the package's model
        inject(self.backbone.module if isinstance(self.backbone, Backbone) else self.backbone, self.noise, sites)

    @property
    def trained(self) -> bool:
        """Whether any noise weight is non-zero."""
        return any(bool(layer.noise_weight.any()) for layer in noisy_layers(self.backbone))

    def noise_parameters(self) -> list[nn.Parameter]:
        """Return W_z and the noise weights of all sites, without the parameters of the backbone."""
        return [self.noise.w_z, *(layer.noise_weight for layer in noisy_layers(self.backbone))]

    @torch.no_grad()
    def randomise(self, std: float | Sequence[float], *, seed: int = 0) -> None:
        """Set the noise weights to normal random values, which gives a spread without training.

        std: standard deviation, one for all layers or one per layer. W_z is not changed.
        """
        generator, layers = torch.Generator().manual_seed(seed), list(noisy_layers(self.backbone))
        sizes = std if isinstance(std, Sequence) else [std] * len(layers)
        for layer, size in zip(layers, sizes, strict=True):
            weight = layer.noise_weight
            weight.copy_(size * torch.randn(weight.shape, generator=generator))

    def draw(self, samples: int, *, seed: int = 0, kind: str = "plain", first: int = 0) -> Tensor:
        """Return the standard normal draw e of each sample, (sample, noise); see `pmlip.noise.draw` for the options."""
        return draws.draw(samples, self.noise.dim, seed=seed, kind=kind, first=first)

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
                self._set_draw_in_backward(outputs)
        finally:
            self.noise.set_draw(None)
        return outputs

    def _set_draw_in_backward(self, outputs: Any) -> None:
        """Set the same draw during the backward pass, because activation checkpointing runs layers again there."""
        draw, rows = self.noise.draw, self.noise.rows

        def restore(_: Tensor) -> None:
            self.noise.set_draw(draw, rows)
            # private API for the end of a backward pass, which DDP uses too
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self.noise.set_draw, None))

        for output in tensors(outputs):
            if output.requires_grad:
                output.register_hook(restore)

    def fold(self, *, sample: int, seed: int = 0, kind: str = "plain") -> nn.Module:
        """Return sample number `sample` as a plain module of the backbone's class, with the same state-dict keys.

        The noise becomes a constant: a linear layer without a bias gets one, and an e3nn layer becomes a
        `ShiftedRadial` with a buffer `shift`.
        """
        check_sample_number(sample, name="sample")
        copied = copy.deepcopy(self)
        copied.noise.set_draw(draws.draw(1, self.noise.dim, seed=seed, kind=kind, first=sample)[0])
        for layer in list(noisy_layers(copied.backbone)):
            layer.fold()
        return copied.backbone

    def stored_settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint needs to rebuild the model, besides the backbone."""
        sites = [
            {"name": site.name, "rows": site.rows, "custom_envelope": site.envelope not in (None, vanish_with_input)}
            for site in self.sites
        ]
        return {"noise_dim": self.noise.dim, "sites": sites}

    def save(self, path: str | Path) -> None:
        """Write the model to a file atomically; `pmlip.load` reads it."""
        checkpoint.write(path, origin=self.origin, settings=self.stored_settings(), state=self.state_dict())
