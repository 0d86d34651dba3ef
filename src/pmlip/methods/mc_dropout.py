"""MC dropout (Gal and Ghahramani 2016): hidden units left out at random, in training and in prediction alike."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pmlip.backbones.base import Backbone, Graph
from pmlip.methods.base import WrappedMethod, each_sample, seeded
from pmlip.noise.layer_classes import Mixin, become, mixed_class


class Dropout(nn.Module):
    """The share of units that is left out. One for a whole network."""

    def __init__(self, share: float) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise ValueError(f"the share of units left out lies between 0 and 1, got {share}")
        self.share = share
        self.active = False

    @contextlib.contextmanager
    def drawing(self, generator: torch.Generator) -> Iterator[None]:
        """The layers that run inside leave units out; outside they use all."""
        self.active = True
        try:
            with seeded(generator):
                yield
        finally:
            self.active = False

    def thin(self, x: Tensor) -> Tensor:
        """x with each number zero with probability `share`, the others scaled up so that the mean stays."""
        if not self.active:
            return x
        kept = torch.rand(x.shape).to(x) >= self.share  # of the CPU, the same on every device
        return x * kept / (1 - self.share)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "active": False}


class ThinnedLayer(Mixin):
    """A layer whose inputs are thinned out."""

    dropout: tuple[Dropout]  # in a tuple, so that it is not registered as a part of every layer

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        out: Tensor = super().forward(self.dropout[0].thin(x), *rest)
        return out


def add_dropout(module: nn.Module, layers: Sequence[str], *, share: float) -> Dropout:
    """Thin out the inputs of the named layers, in place; gives what switches it on."""
    dropout = Dropout(share)
    for name in layers:
        layer = module.get_submodule(name)
        become(layer, mixed_class(ThinnedLayer, type(layer)))
        assert isinstance(layer, ThinnedLayer)
        layer.dropout = (dropout,)
    return dropout


class MCDropout(WrappedMethod):
    """A fine-tuned potential with dropout between the layers of its message and update MLPs: absolute error."""

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
