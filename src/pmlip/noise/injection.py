"""Add noise to the linear layers of a network: h = W x + b + W_noise z.

A layer becomes noisy by a change of its class (see `layer_classes`) and one more parameter, `noise_weight`. The other
parameters keep their names, so a state dict of the original module still loads with strict=False.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from pmlip.noise.layer_classes import Mixin, become, mixed_class
from pmlip.noise.source import Noise
from pmlip.noise.split_linear import SplitInput

Envelope = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    """A layer where noise enters."""

    name: str  # name of the layer in `named_modules()`
    rows: str = "row"  # kind of row in its input (node, edge, angle, ...); selects the system index of the rows
    envelope: Envelope | None = None  # factor on the noise, computed from the layer's input; must be picklable


Sites = str | Sequence[str | Site] | Callable[[str, nn.Module], bool]


def vanish_with_input(x: Tensor) -> Tensor:
    """Return the envelope 1 - exp(-16 |x|^2): 0 where the input is 0, and as smooth as the input.

    Radial layers need it. The cutoff function is applied to their input only, so they must map 0 to 0. Otherwise an
    atom at the cutoff would still send a message, and the energy would jump there.
    """
    return -torch.expm1(-16 * x.square().sum(-1, keepdim=True))


class NoisyLayer(Mixin):
    """Base class of noisy layers."""

    noise_weight: nn.Parameter  # W_noise (out, noise), initialised to zero
    noise_source: tuple[Noise]  # in a tuple, so that it is not registered as a submodule of every layer
    noise_site: Site

    def perturb(self, noise: Noise, site: Site, out_features: int, like: Tensor) -> None:
        """Add the noise parameter, with the device and precision of `like`."""
        self.noise_weight = nn.Parameter(like.new_zeros(out_features, noise.dim))
        self.noise_source = (noise,)
        self.noise_site = site

    def shift(self, x: Tensor | SplitInput, out: Tensor) -> Tensor | None:
        """Return W_noise z for every row of the output, times the envelope of the input x; None if no draw is set."""
        noise, rows = self.noise_source[0], self.noise_site.rows
        shift = noise.shift(self.noise_weight, rows)
        if shift is None:
            return None
        if shift.dim() > 1:
            if noise.rows[rows] is not None and len(shift) != len(out):
                raise ValueError(
                    f"site {self.noise_site.name!r} has {len(out)} rows, "
                    f"but the system index of its {rows!r} rows has {len(shift)}"
                )
            # all entries of a row share its noise: broadcast over the axes between rows and features
            shift = shift.reshape(*shift.shape[:-1], *[1] * (out.dim() - shift.dim()), shift.shape[-1])
        envelope = self.noise_site.envelope
        if envelope is None:
            return shift
        return shift * envelope(x.concatenated() if isinstance(x, SplitInput) else x)

    def fold(self) -> None:
        """Become a plain layer in place that includes the noise of the current draw."""
        raise NotImplementedError

    def _unperturb(self) -> tuple[Tensor | None, Site]:
        """Become the plain layer without noise, in place; return the noise W_noise z and the site."""
        site = self.noise_site
        shift = self.noise_source[0].shift(self.noise_weight.detach(), site.rows)
        del self.noise_weight, self.noise_source, self.noise_site
        become(self, self.plain_class)
        return (None if shift is None else shift.detach()), site


class NoisyLinear(NoisyLayer):
    """Noisy version of `nn.Linear` and its subclasses."""

    def forward(self, x: Tensor | SplitInput) -> Tensor:
        out: Tensor = super().forward(x)
        shift = self.shift(x, out)
        return out if shift is None else out + shift

    def fold(self) -> None:
        shift, site = self._unperturb()
        if shift is None:
            return
        if site.envelope is not None:
            raise ValueError(f"cannot fold site {site.name!r}: it has an envelope, so its noise is not a constant bias")
        layer: Any = self  # now a plain nn.Linear
        layer.bias = nn.Parameter(shift if layer.bias is None else layer.bias.detach() + shift)


class NoisyRadial(NoisyLayer):
    """Noisy version of the layers of e3nn's `FullyConnectedNet`: a weight matrix and an activation, without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return after_activation(self, before_activation(self, x, self.shift(x, x)))

    def fold(self) -> None:
        shift, site = self._unperturb()
        if shift is None:
            return
        become(self, ShiftedRadial)
        self.envelope = site.envelope
        self.register_buffer("shift", shift)


class ShiftedRadial(nn.Module):
    """One folded sample of a `NoisyRadial`; e3nn's layer has no bias, so the shift is a buffer."""

    shift: Tensor
    envelope: Envelope | None

    def forward(self, x: Tensor) -> Tensor:
        return after_activation(self, before_activation(self, x, self.folded_shift(x)))

    def folded_shift(self, x: Tensor) -> Tensor:
        return self.shift if self.envelope is None else self.shift * self.envelope(x)


def before_activation(layer: Any, x: Tensor, shift: Tensor | None) -> Tensor:
    """Return x W / sqrt(h_in var_in) + shift, the first half of e3nn's layer."""
    out = x @ (layer.weight / (layer.h_in * layer.var_in) ** 0.5)
    return out if shift is None else out + shift


def after_activation(layer: Any, out: Tensor) -> Tensor:
    """Return act(out) sqrt(var_out), the second half of e3nn's layer."""
    return (out if layer.act is None else layer.act(out)) * layer.var_out**0.5


def _is_radial(layer: nn.Module) -> bool:
    return all(hasattr(layer, name) for name in ("weight", "act", "h_in", "h_out", "var_in", "var_out"))


def _is_supported(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or _is_radial(layer)


def inject(module: nn.Module, noise: Noise, sites: Sequence[Site]) -> None:
    """Make the layers at `sites` noisy, in place."""
    for site in sites:
        layer = module.get_submodule(site.name)
        weight = next(layer.parameters()).detach()
        out_features = layer.out_features if isinstance(layer, nn.Linear) else weight.shape[1]
        become(layer, mixed_class(NoisyLinear if isinstance(layer, nn.Linear) else NoisyRadial, type(layer)))
        assert isinstance(layer, NoisyLayer)
        layer.perturb(noise, site, out_features, like=weight)


def noisy_layers(module: nn.Module) -> Iterator[NoisyLayer]:
    """Yield the noisy layers of a module."""
    return (layer for layer in module.modules() if isinstance(layer, NoisyLayer))


def find_sites(module: nn.Module, wanted: Sites) -> tuple[Site, ...]:
    """Return the sites selected by names, glob patterns or a function (name, module) -> bool.

    If a selected module is not a linear layer, its first linear layer in the order of registration is used. So the name
    of an MLP is enough, even if the MLP begins with a norm or dropout.
    """
    modules = dict(module.named_modules())
    if any(isinstance(layer, NoisyLayer) for layer in modules.values()):
        raise ValueError("this module is perturbed already; pass the original module")

    chosen: list[Site] = []
    if callable(wanted):
        chosen = [Site(name) for name, layer in modules.items() if wanted(name, layer)]
        if not chosen:
            raise ValueError(f"the sites function selected no module; {_suggest('', modules)}")
    else:
        for entry in [wanted] if isinstance(wanted, str | Site) else wanted:
            site = entry if isinstance(entry, Site) else Site(entry)
            names = [site.name] if site.name in modules else _matching(site.name, modules)
            if not names:
                raise ValueError(f"no module matches site {site.name!r}; {_suggest(site.name, modules)}")
            chosen += [replace(site, name=name) for name in names]
    if not chosen:
        raise ValueError(f"no sites were given; {_suggest('', modules)}")

    found: dict[str, Site] = {}
    for site in chosen:
        name = _first_linear(site.name, modules[site.name])
        layer = modules[name]
        envelope = site.envelope or (vanish_with_input if _is_radial(layer) else None)
        found.setdefault(name, replace(site, name=name, envelope=envelope))
    return tuple(found.values())


def _candidates(modules: dict[str, nn.Module]) -> list[str]:
    return [name for name, layer in modules.items() if _is_supported(layer)]


def _matching(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    """Return the modules that contain a supported layer and match the pattern; `*` does not match a dot."""
    candidates, parts = _candidates(modules), pattern.split(".")
    fitting = [name for name in modules if len(name.split(".")) == len(parts)]
    fitting = [name for name in fitting if all(map(fnmatchcase, name.split("."), parts))]
    return [name for name in fitting if any(inner == name or inner.startswith(f"{name}.") for inner in candidates)]


def _first_linear(name: str, module: nn.Module) -> str:
    for inner, layer in module.named_modules():
        if _is_supported(layer):
            return ".".join(part for part in (name, inner) if part)
    raise ValueError(
        f"site {name!r} ({type(module).__name__}) is not and does not contain a layer that supports noise; "
        "allowed: nn.Linear and the layers of e3nn's FullyConnectedNet"
    )


def _suggest(name: str, modules: dict[str, nn.Module]) -> str:
    candidates = _candidates(modules)
    if not candidates:
        return "the module has no linear layer at all"
    close = difflib.get_close_matches(name, candidates, n=8, cutoff=0.4) or candidates[:8]
    more = f" ... ({len(candidates)} in all)" if len(candidates) > len(close) else ""
    return f"candidates: {', '.join(close)}{more}"
