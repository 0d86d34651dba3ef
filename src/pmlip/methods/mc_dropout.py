"""MC dropout (Gal and Ghahramani 2016): hidden units dropped at random, in training and in prediction."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pmlip.backbones.base import Backbone, Graph
from pmlip.methods.base import WrappedMethod, each_sample, seeded
from pmlip.noise.layer_classes import Mixin, become, mixed_class


class Dropout(nn.Module):
    """Dropout probability and on/off switch; all layers of a network share one instance."""

    def __init__(self, share: float) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise ValueError(f"share, the dropout probability, must lie between 0 and 1, got share={share}")
        self.share = share
        self.active = False

    @contextlib.contextmanager
    def drawing(self, generator: torch.Generator) -> Iterator[None]:
        """Layers drop units inside the block only."""
        self.active = True
        try:
            with seeded(generator):
                yield
        finally:
            self.active = False

    def thin(self, x: Tensor) -> Tensor:
        """x with each element set to zero with probability `share`, and the rest scaled up to keep the mean."""
        if not self.active:
            return x
        kept = torch.rand(x.shape).to(x) >= self.share  # drawn on the CPU: the same on every device
        return x * kept / (1 - self.share)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "active": False}


class ThinnedLayer(Mixin):
    """A layer with dropout on its inputs."""

    dropout: tuple[Dropout]  # a tuple, so that torch does not register it as a submodule of every layer

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        out: Tensor = super().forward(self.dropout[0].thin(x), *rest)
        return out


def add_dropout(module: nn.Module, layers: Sequence[str], *, share: float) -> Dropout:
    """Add dropout to the inputs of the named layers, in place; returns the `Dropout` that switches it on."""
    dropout = Dropout(share)
    for name in layers:
        layer = module.get_submodule(name)
        become(layer, mixed_class(ThinnedLayer, type(layer)))
        assert isinstance(layer, ThinnedLayer)
        layer.dropout = (dropout,)
    return dropout


class MCDropout(WrappedMethod):
    """A potential with dropout between the layers of its message and update MLPs, trained on the absolute error."""

    name = "mc-dropout"

    def __init__(self, backbone: Backbone, *, share: float = 0.001) -> None:
        super().__init__(backbone)
        inner = [site.name for mlp in backbone.mlps() for site in mlp[1:]]
        self.dropout = add_dropout(self.backbone.module, inner, share=share)

    def settings(self) -> dict[str, float]:
        return {"share": self.dropout.share}

    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        if draws is None:
            return {name: value[None] for name, value in self.backbone(graph).items()}

        def run(generator: torch.Generator) -> dict[str, Tensor]:
            with self.dropout.drawing(generator):
                return dict(self.backbone(graph))

        return each_sample(run, draws)


make = MCDropout
