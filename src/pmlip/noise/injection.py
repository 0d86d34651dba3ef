"""Where noise enters a network: h = W x + b + W_noise z at the first linear layer of a block.

A layer is made noisy by changing its class (see `layers`) and giving it one more parameter, `noise_weight`. Its own
parameters keep their names, so weights of the original still load; strict=False leaves the noise weights alone.
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

    name: str  # of the layer inside the module, as in `named_modules()`
    rows: str = "row"  # kind of its rows (node, edge, angle, ...): which system index broadcasts the noise
    envelope: Envelope | None = None  # factor on the shift, from the layer's input; must pickle


Sites = str | Sequence[str | Site] | Callable[[str, nn.Module], bool]


def vanish_with_input(x: Tensor) -> Tensor:
    """Envelope 1 - exp(-16 |x|^2): 0 where the input is 0, and as smooth as the input.

    Radial features carry the cutoff function, and nothing after a radial layer does: it must keep mapping
    0 to 0, or an atom at the cutoff would still send a message and the energy would jump.
    """
    return -torch.expm1(-16 * x.square().sum(-1, keepdim=True))


class NoisyLayer(Mixin):
    """What the noisy layers share."""

    noise_weight: nn.Parameter  # (out, noise), zero at the start
    noise_source: tuple[Noise]  # in a tuple, so that it is not registered as a part of every layer
    noise_site: Site

    def perturb(self, noise: Noise, site: Site, out_features: int, like: Tensor) -> None:
        self.noise_weight = nn.Parameter(like.new_zeros(out_features, noise.dim))
        self.noise_source = (noise,)
        self.noise_site = site

    def shift(self, x: Tensor | SplitInput, out: Tensor) -> Tensor | None:
        """W_noise z for every row of an output, times the envelope of its input x."""
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
            # axes between the rows and the features share the noise of their row
            shift = shift.reshape(*shift.shape[:-1], *[1] * (out.dim() - shift.dim()), shift.shape[-1])
        envelope = self.noise_site.envelope
        if envelope is None:
            return shift
        return shift * envelope(x.concatenated() if isinstance(x, SplitInput) else x)

    def fold(self) -> None:
        """Become a plain layer again that computes what the draw in force makes of this one."""
        raise NotImplementedError

    def _unperturb(self) -> tuple[Tensor | None, Site]:
        """Become the plain layer at z = 0; gives what the noise had added."""
        site = self.noise_site
        shift = self.noise_source[0].shift(self.noise_weight.detach(), site.rows)
        del self.noise_weight, self.noise_source, self.noise_site
        become(self, self.plain_class)
        return (None if shift is None else shift.detach()), site


class NoisyLinear(NoisyLayer):
    """For `nn.Linear` and its subclasses."""

    def forward(self, x: Tensor | SplitInput) -> Tensor:
        out: Tensor = super().forward(x)
        shift = self.shift(x, out)
        return out if shift is None else out + shift

    def fold(self) -> None:
        shift, site = self._unperturb()
        if shift is None:
            return
        if site.envelope is not None:
            raise ValueError(f"site {site.name!r} has an envelope: its samples are no change of the bias")
        layer: Any = self  # an nn.Linear again
        layer.bias = nn.Parameter(shift if layer.bias is None else layer.bias.detach() + shift)


class NoisyRadial(NoisyLayer):
    """For the layers of e3nn's `FullyConnectedNet`: a bare weight matrix with the activation inside."""

    def forward(self, x: Tensor) -> Tensor:
        return _radial(self, x, self.shift(x, x))

    def fold(self) -> None:
        shift, site = self._unperturb()
        if shift is None:
            return
        become(self, ShiftedRadial)
        self.envelope = site.envelope
        self.register_buffer("shift", shift)


class ShiftedRadial(nn.Module):
    """One folded sample of a `NoisyRadial`: e3nn's layer has no bias that could hold the shift."""

    shift: Tensor
    envelope: Envelope | None

    def forward(self, x: Tensor) -> Tensor:
        return _radial(self, x, self.shift if self.envelope is None else self.shift * self.envelope(x))


def _radial(layer: Any, x: Tensor, shift: Tensor | None) -> Tensor:
    """e3nn's act(x W / sqrt(h_in var_in)) sqrt(var_out), with the shift added before the activation."""
    out = x @ (layer.weight / (layer.h_in * layer.var_in) ** 0.5)
    if shift is not None:
        out = out + shift
    if layer.act is not None:
        out = layer.act(out)
    return out * layer.var_out**0.5


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
    return (layer for layer in module.modules() if isinstance(layer, NoisyLayer))


def find_sites(module: nn.Module, wanted: Sites) -> tuple[Site, ...]:
    """The sites that names, glob patterns or a function (name, module) -> bool select.

    A selected block that is not itself a linear layer stands for its first linear layer in the order of
    registration, so an MLP that begins with a norm or a dropout may be named as a whole.
    """
    modules = dict(module.named_modules())
    candidates = [name for name, layer in modules.items() if _is_supported(layer)]
    if any(isinstance(layer, NoisyLayer) for layer in modules.values()):
        raise ValueError("this module is perturbed already; perturb the original instead")

    chosen: list[Site] = []
    if callable(wanted):
        chosen = [Site(name) for name, layer in modules.items() if wanted(name, layer)]
        if not chosen:
            raise ValueError(f"the sites function selected no module; {_suggest('', candidates)}")
    else:
        for entry in [wanted] if isinstance(wanted, str | Site) else wanted:
            site = entry if isinstance(entry, Site) else Site(entry)
            names = [site.name] if site.name in modules else _matching(site.name, candidates, modules)
            if not names:
                raise ValueError(f"no module matches site {site.name!r}; {_suggest(site.name, candidates)}")
            chosen += [replace(site, name=name) for name in names]
    if not chosen:
        raise ValueError(f"no sites were given; {_suggest('', candidates)}")

    found: dict[str, Site] = {}
    for site in chosen:
        name = _first_linear(site.name, modules[site.name])
        layer = modules[name]
        envelope = site.envelope or (vanish_with_input if _is_radial(layer) else None)
        found.setdefault(name, replace(site, name=name, envelope=envelope))
    return tuple(found.values())


def _matching(pattern: str, candidates: list[str], modules: dict[str, nn.Module]) -> list[str]:
    """Modules that match a glob pattern, part by part between the dots, and hold a layer that can take noise."""
    parts = pattern.split(".")
    fitting = [name for name in modules if len(name.split(".")) == len(parts)]
    fitting = [name for name in fitting if all(map(fnmatchcase, name.split("."), parts))]
    return [name for name in fitting if any(inner == name or inner.startswith(f"{name}.") for inner in candidates)]


def _first_linear(name: str, module: nn.Module) -> str:
    for inner, layer in module.named_modules():
        if _is_supported(layer):
            return ".".join(part for part in (name, inner) if part)
    raise ValueError(
        f"site {name!r} ({type(module).__name__}) is not and does not contain a layer that can take noise; "
        "allowed: nn.Linear and the layers of e3nn's FullyConnectedNet"
    )


def _suggest(name: str, candidates: list[str]) -> str:
    if not candidates:
        return "the module has no linear layer at all"
    close = difflib.get_close_matches(name, candidates, n=8, cutoff=0.4) or candidates[:8]
    more = f" ... ({len(candidates)} in all)" if len(candidates) > len(close) else ""
    return f"candidates: {', '.join(close)}{more}"
