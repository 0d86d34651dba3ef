"""Gradients with respect to shifts at the sites of a network, for each atom or for all rows of a site together.

A shift s_a for the rows of atom a changes the output h of a site to h + envelope s_a, so dE/ds_a is the sum of
envelope dE/dh over these rows. Tensor hooks add up this sum during any backward pass of the energy, for example the
pass that gives the forces.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from pmlip.noise.injection import (
    NoisyLayer,
    ShiftedRadial,
    Site,
    Sites,
    after_activation,
    before_activation,
    find_sites,
    noisy_layers,
)
from pmlip.noise.layer_classes import Mixin, become, mixed_class
from pmlip.noise.split_linear import SplitInput


class SiteGradients:
    """The gradients of one batch: `per_atom` (atom, feature) is complete after a backward pass of the energy."""

    def __init__(self, atom_of_row: Mapping[str, Tensor], widths: Mapping[str, int], like: Tensor) -> None:
        """atom_of_row: kind of row -> atom of each row. widths: name of each site -> width of its output."""
        self.outputs: list[Tensor] = []  # of the sites, from which a backward pass can start
        self._atom_of_row = atom_of_row
        # one tensor per site: adding rows to a slice of columns takes seven times as long
        self._sums = {name: like.new_zeros(len(atom_of_row["node"]), width) for name, width in widths.items()}

    @property
    def per_atom(self) -> Tensor:
        return torch.cat(list(self._sums.values()), 1)

    def pass_on(self, site: Site, output: Tensor, envelope: Tensor | None) -> Tensor:
        """Collect the gradient of this output of a site."""
        if torch.is_grad_enabled():
            if not output.requires_grad:
                output.requires_grad_()
            self.outputs.append(output)
            output.register_hook(partial(self._add, site, envelope))
        return output

    def _add(self, site: Site, envelope: Tensor | None, gradient: Tensor) -> None:
        rows = gradient.detach() if envelope is None else gradient.detach() * envelope.detach()
        # index_add is reproducible with several threads
        self._sums[site.name].index_add_(0, self._atom_of_row[site.rows], rows)


class SiteShifts:
    """One shift for each site, zero, added to all rows of its output, to differentiate with respect to it."""

    def __init__(self, widths: Mapping[str, int], like: Tensor) -> None:
        self._shifts = {name: like.new_zeros(width).requires_grad_() for name, width in widths.items()}

    @property
    def values(self) -> list[Tensor]:
        return list(self._shifts.values())

    def pass_on(self, site: Site, output: Tensor, envelope: Tensor | None) -> Tensor:
        shift = self._shifts[site.name]
        return output + (shift if envelope is None else shift * envelope)


class Tap(Protocol):
    """What sees the outputs of the sites, before their activation."""

    def pass_on(self, site: Site, output: Tensor, envelope: Tensor | None) -> Tensor:
        """Return the output that the site passes on. envelope: factor on shifts, (row, 1), if the site has one."""


class TappedLayer(Mixin):
    """Base class of the layers at the sites while a tap sees their outputs."""

    tapped_site: Site
    tap: tuple[Tap]  # in a tuple, as `NoisyLayer.noise_source`

    def pass_on(self, inputs: Callable[[], Tensor], output: Tensor) -> Tensor:
        envelope = self.tapped_site.envelope
        return self.tap[0].pass_on(self.tapped_site, output, None if envelope is None else envelope(inputs()))


class TappedLinear(TappedLayer):
    def forward(self, x: Tensor | SplitInput) -> Tensor:
        out: Tensor = super().forward(x)
        return self.pass_on(x.concatenated if isinstance(x, SplitInput) else lambda: x, out)


class TappedRadial(TappedLayer):
    """e3nn's layer contains its activation, and a shift enters before the activation."""

    def forward(self, x: Tensor) -> Tensor:
        shift = None
        if isinstance(self, NoisyLayer):
            shift = self.shift(x, x)
        elif isinstance(self, ShiftedRadial):
            shift = self.folded_shift(x)
        return after_activation(self, self.pass_on(lambda: x, before_activation(self, x, shift)))


def sites_of(module: nn.Module, wanted: Sites) -> tuple[Site, ...]:
    """Return the layers where noise enters; if the module has no noise, the layers that `wanted` selects."""
    own = tuple(layer.noise_site for layer in noisy_layers(module))
    return own or find_sites(module, wanted)


def widths_of(module: nn.Module, sites: Sequence[Site]) -> dict[str, int]:
    """Return the width of the output of each site."""
    layers = {site.name: module.get_submodule(site.name) for site in sites}
    return {
        name: layer.out_features if isinstance(layer, nn.Linear) else next(layer.parameters()).shape[1]
        for name, layer in layers.items()
    }


@contextlib.contextmanager
def collect(module: nn.Module, sites: Sequence[Site], atom_of_row: Mapping[str, Tensor]) -> Iterator[SiteGradients]:
    """Collect the gradients of the sites in the passes of `module` inside the block."""
    for site in sites:
        if site.rows not in atom_of_row:
            raise ValueError(
                f"the atoms of the rows of site {site.name!r} are unknown: its rows are {site.rows!r}, allowed: "
                f"{', '.join(atom_of_row)}; perturb the potential with Site({site.name!r}, rows=...)"
            )
    gradients = SiteGradients(atom_of_row, widths_of(module, sites), next(module.parameters()))
    with _tapped(module, sites, gradients):
        yield gradients


@contextlib.contextmanager
def shifted(module: nn.Module, sites: Sequence[Site]) -> Iterator[list[Tensor]]:
    """Shifts at the sites, which are zero; inside the block, the outputs of `module` can be differentiated by them."""
    shifts = SiteShifts(widths_of(module, sites), next(module.parameters()))
    with _tapped(module, sites, shifts):
        yield shifts.values


@contextlib.contextmanager
def _tapped(module: nn.Module, sites: Sequence[Site], tap: Tap) -> Iterator[None]:
    layers = {site: module.get_submodule(site.name) for site in sites}
    plain = {site: type(layer) for site, layer in layers.items()}
    try:
        for site, layer in layers.items():
            family = TappedLinear if isinstance(layer, nn.Linear) else TappedRadial
            become(layer, mixed_class(family, plain[site]))
            layer.tapped_site, layer.tap = site, (tap,)  # type: ignore[assignment]
        yield
    finally:
        for site, layer in layers.items():
            become(layer, plain[site])
            for name in ("tapped_site", "tap"):
                layer.__dict__.pop(name, None)
