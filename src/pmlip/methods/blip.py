"""BLIP (Coscia et al. 2025), reconstructed from its paper: Bayesian weights whose variance depends on the input.

    y = W x + b + sqrt(alpha (W^2)(x^2)) eps,   eps ~ N(0, 1) for every row and output unit

This is the distribution of y for weights ~ N(W, alpha W^2) drawn independently for every row. A small network predicts
alpha, one number for each layer and row, from the raw features of the row. The loss contains the KL divergence of the
posterior from the prior N(0, a0 W^2).
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from ase.build import bulk
from torch import Tensor, nn

from pmlip.backbones.base import Backbone, Graph
from pmlip.methods.base import Learner, WrappedMethod, each_sample, seeded
from pmlip.noise.layer_classes import Mixin, become, mixed_class
from pmlip.noise.split_linear import SplitInput, linear


class Posterior(nn.Module):
    """Predicts alpha of every layer and row; all layers of a network share one instance.

    layers: kind of row -> number of layers with rows of this kind. features: kind of row -> number of raw features.
    """

    alpha: Mapping[str, Tensor] | None  # kind of row -> (..., layer); None: no noise (the MAP network)

    def __init__(
        self,
        layers: Mapping[str, int],
        features: Mapping[str, int],
        *,
        width: int = 64,
        largest: float = 0.8,  # upper limit of p in alpha = p / (1 - p)
        prior: float = 0.5,  # p of the prior
        offset: float = 0.0,  # initial value subtracted from the logit of p; 10 is nearly deterministic
    ) -> None:
        super().__init__()
        if not 0 < largest < 1 or not 0 < prior < 1:
            raise ValueError(f"largest and prior must lie between 0 and 1, got largest={largest} and prior={prior}")
        self.networks = nn.ModuleDict(
            {
                kind: nn.Sequential(nn.Linear(features[kind], width), nn.SiLU(), nn.Linear(width, count))
                for kind, count in layers.items()
            }
        )
        self.offset = nn.Parameter(torch.tensor(float(offset)), requires_grad=offset != 0)
        self.largest, self.prior_alpha = largest, prior / (1 - prior)
        self.alpha = None

    def infer(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """alpha (..., layer) for the raw features (..., feature) of each kind of row."""
        alphas = {}
        for kind, values in features.items():
            p = torch.sigmoid(self.networks[kind](values) - self.offset).clamp(1e-5, self.largest)
            alphas[kind] = p / (1 - p)
        return alphas

    @contextlib.contextmanager
    def drawing(self, alpha: Mapping[str, Tensor] | None, generator: torch.Generator | None) -> Iterator[None]:
        """Layers draw their weights with this alpha inside the block; None: no noise."""
        self.alpha = alpha
        try:
            with seeded(generator):
                yield
        finally:
            self.alpha = None

    def divergence(self, alpha: Mapping[str, Tensor]) -> Tensor:
        """KL divergence per weight: averaged over rows and layers, summed over kinds of rows."""
        present = [values for values in alpha.values() if len(values)]  # a diatomic molecule has no angle rows
        return sum((weight_divergence(values, self.prior_alpha).mean() for values in present), torch.zeros(()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "alpha": None}


def weight_divergence(alpha: Tensor, prior_alpha: float) -> Tensor:
    """KL( N(w, alpha w^2) || N(0, a0 w^2) ) = ((alpha + 1) / a0 + ln a0 - ln alpha - 1) / 2, for any w."""
    a0 = torch.as_tensor(prior_alpha).to(alpha)
    return 0.5 * ((alpha + 1) / a0 + a0.log() - alpha.log() - 1)


class VariationalLayer(Mixin):
    """A linear layer with random weights."""

    posterior: tuple[Posterior]  # a tuple, so that torch does not register it as a submodule of every layer
    place: tuple[str, int]  # kind of row, and index of this layer among the layers of that kind

    def forward(self, x: Tensor | SplitInput) -> Tensor:
        layer: Any = self
        mean: Tensor = super().forward(x)
        posterior = self.posterior[0]
        if posterior.alpha is None:
            return mean
        kind, number = self.place
        variance = posterior.alpha[kind][..., number : number + 1] * linear(x.square(), layer.weight.square(), None)
        noise = torch.randn(mean.shape).to(mean)  # drawn on the CPU: the same on every device
        # 1e-18 keeps the gradient of the square root finite for rows of zeros
        return mean + (variance + 1e-18).sqrt() * noise


def make_variational(
    module: nn.Module, layers: Mapping[str, Sequence[str]], features: Mapping[str, int], **options: float
) -> Posterior:
    """Make the named linear layers variational, in place; returns their posterior.

    layers: kind of row -> names of the layers with rows of this kind. options: passed to `Posterior`.
    """
    counts = {kind: len(names) for kind, names in layers.items()}
    posterior = Posterior(counts, features, **options)  # type: ignore[arg-type]  # all keyword-only arguments are numbers
    for kind, names in layers.items():
        for number, name in enumerate(names):
            layer = module.get_submodule(name)
            if not isinstance(layer, nn.Linear):
                raise ValueError(f"{name!r} is a {type(layer).__name__}; only linear layers can be variational")
            become(layer, mixed_class(VariationalLayer, type(layer)))
            assert isinstance(layer, VariationalLayer)
            layer.posterior, layer.place = (posterior,), (kind, number)
    return posterior


class BLIP(WrappedMethod):
    """A potential with variational weights in all message and update MLPs; the loss is absolute error + beta KL.

    The defaults are the values published for Orb.
    """

    name = "blip"

    def __init__(
        self,
        backbone: Backbone,
        *,
        beta: float = 1e-3,
        prior: float = 0.01,
        largest: float = 0.1,
        offset: float = 10.0,
    ) -> None:
        super().__init__(backbone)
        if beta < 0:
            raise ValueError(f"the weight of the KL divergence must not be negative, got beta={beta}")
        layers: dict[str, list[str]] = {}
        for site in (site for mlp in backbone.mlps() for site in mlp):
            layers.setdefault(site.rows, []).append(site.name)
        silicon = bulk("Si")
        silicon.info |= {"charge": 0, "spin": 1}  # required by some potentials
        example = backbone.row_features(backbone.graph([silicon]))
        features = {kind: example[kind].shape[-1] for kind in layers}
        self.options = {"beta": beta, "prior": prior, "largest": largest, "offset": offset}
        self.posterior = make_variational(
            self.backbone.module, layers, features, prior=prior, largest=largest, offset=offset
        ).to(next(backbone.parameters()))
        # values of the last call of `forward` with noise
        self.last_penalty: Tensor | None = None
        self.last_alpha = math.nan

    def settings(self) -> dict[str, float]:
        return self.options

    def learner(self) -> Learner:
        return BLIPLearner(self)

    def forward(self, graph: Graph, draws: Tensor | None) -> dict[str, Tensor]:
        if draws is None:
            return {name: value[None] for name, value in self.backbone(graph).items()}
        features = self.backbone.row_features(graph)
        alpha = self.posterior.infer({kind: features[kind] for kind in self.posterior.networks})
        self.last_penalty = self.options["beta"] * self.posterior.divergence(alpha)
        self.last_alpha = math.exp(
            float(torch.cat([values.detach().log().flatten() for values in alpha.values()]).mean())
        )

        def run(generator: torch.Generator) -> dict[str, Tensor]:
            with self.posterior.drawing(alpha, generator):
                return dict(self.backbone(graph))

        return each_sample(run, draws)


class BLIPLearner(Learner):
    model: BLIP

    def new_parameters(self) -> list[nn.Parameter]:
        return list(self.model.posterior.parameters())

    def penalty(self) -> Tensor | None:
        penalty, self.model.last_penalty = self.model.last_penalty, None  # frees the autograd graph of the last pass
        return penalty

    def watched(self) -> dict[str, float]:
        """Geometric mean of alpha; the spread vanishes with it."""
        return {"alpha": self.model.last_alpha}


make = BLIP
