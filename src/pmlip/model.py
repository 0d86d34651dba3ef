"""Perturbed models: a module or a potential whose samples are functions."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from ase import Atoms
from torch import Tensor, nn
from torch.nn import functional

from pmlip import checkpoint, methods, noise, parabola, response
from pmlip.backbones.base import Backbone, Graph
from pmlip.hints import first_reason
from pmlip.injection import Site, Sites, find_sites, inject, noisy_layers, vanish_with_input
from pmlip.methods.base import Method, Progress
from pmlip.samples import Samples


class Perturbed(nn.Module):
    """Any module with noise at its sites: `model(*args, noise=e)` is the sample that e names.

    noise (noise,) is one sample of one system. For a batch, noise (system, noise) with
    rows={kind: system of each row} for the kinds of rows that the sites name; None instead of an index says that
    the leading axes of the layers' inputs are the systems. noise=None is z = 0.
    """

    def __init__(self, backbone: nn.Module, sites: tuple[Site, ...], noise_dim: int) -> None:
        super().__init__()
        self.origin = checkpoint.Origin.of(backbone)
        self.record: dict[str, Any] = {}  # how it was trained and calibrated, for its file
        self.sites = sites
        self.noise = noise.Noise(noise_dim).to(next(backbone.parameters()))
        self.backbone = copy.deepcopy(backbone)
        # the sites of a potential are named as in its package's own model
        inject(self.backbone.module if isinstance(self.backbone, Backbone) else self.backbone, self.noise, sites)

    @property
    def trained(self) -> bool:
        """Whether any noise weight has left zero."""
        return any(bool(layer.noise_weight.any()) for layer in noisy_layers(self.backbone))

    def noise_parameters(self) -> list[nn.Parameter]:
        """W_z and the noise weights of all sites, without the backbone's own parameters."""
        return [self.noise.mixing, *(layer.noise_weight for layer in noisy_layers(self.backbone))]

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
        return noise.draw(samples, self.noise.dim, seed=seed, kind=kind)

    def forward(
        self,
        *args: Any,
        noise: Tensor | None = None,
        rows: Mapping[str, Tensor | None] | None = None,
        **kwargs: Any,
    ) -> Any:
        self.noise.force(noise, rows)
        try:
            outputs = self.backbone(*args, **kwargs)
            if noise is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._put_in_force_again(outputs)
        finally:
            self.noise.force(None)
        return outputs

    def _put_in_force_again(self, outputs: Any) -> None:
        """During the backward pass of `outputs` their noise is in force: activation checkpointing runs layers again."""
        draw, rows = self.noise.draw, self.noise.rows

        def put_back(_: Tensor) -> None:
            self.noise.force(draw, rows)
            # the engine's own callback for the end of a backward pass, which DDP relies on too
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self.noise.force, None))

        for output in _tensors(outputs):
            if output.requires_grad:
                output.register_hook(put_back)

    def fold(self, *, sample: int, seed: int = 0, kind: str = "plain") -> nn.Module:
        """Sample number `sample` as a plain module of the backbone's own class, with its own state-dict keys.

        A linear layer without a bias gets one, and a layer of e3nn, which has none, stays a small wrapper.
        """
        if sample < 0:
            raise ValueError(f"samples are numbered from 0, got sample={sample}")
        copied = copy.deepcopy(self)
        copied.noise.force(copied.draw(sample + 1, seed=seed, kind=kind)[sample])
        for layer in list(noisy_layers(copied.backbone)):
            layer.fold()
        return copied.backbone

    def settings(self) -> dict[str, Any]:
        """What it was made with, besides the backbone."""
        sites = [
            {"name": site.name, "rows": site.rows, "custom_envelope": site.envelope not in (None, vanish_with_input)}
            for site in self.sites
        ]
        return {"noise_dim": self.noise.dim, "sites": sites}

    def save(self, path: str | Path) -> None:
        """Write everything to one file, whole or not at all; `pmlip.load` reads it."""
        checkpoint.write(
            path, origin=self.origin, settings=self.settings(), state=self.state_dict(), record=self.record
        )


ATOMS_IN_A_GRADIENT = 64  # times samples, in one pass


class Potential(Perturbed, Method):
    """A perturbed interatomic potential. Sample k is the same potential for all structures it is asked about."""

    backbone: Backbone
    energy_curvature: Tensor
    trains_on_samples = True
    calibrated_at_end = True

    def __init__(self, backbone: Backbone, sites: tuple[Site, ...], noise_dim: int) -> None:
        super().__init__(backbone, sites, noise_dim)
        # The zero of a sample's energies, in eV per atom: its slope in z, and its curvature. Noise that moves forces
        # moves all energies together much more than it moves them apart, and about their zero the data leave no doubt.
        self.energy_zero = nn.Parameter(torch.zeros_like(self.noise.mixing[0]))
        self.register_buffer("energy_curvature", torch.zeros_like(self.noise.mixing.detach()))

    def forward(self, graph: Graph, noise: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]  # not any arguments
        """Outputs with the sample axis first, for noise (sample, noise) or (sample, system, noise); None: z = 0."""
        noise = torch.zeros(1, self.noise.dim) if noise is None else noise
        if noise.dim() == 2:
            noise = noise[:, None].expand(-1, graph.systems, -1)
        if noise.dim() != 3 or noise.shape[1:] != (graph.systems, self.noise.dim):
            raise ValueError(
                f"noise for a batch of {graph.systems} must have shape (sample, {self.noise.dim}) or "
                f"(sample, {graph.systems}, {self.noise.dim}), got {tuple(noise.shape)}"
            )
        samples = len(noise)
        repeated = self.backbone.repeat(graph, samples)
        outputs = super().forward(repeated, noise=noise.flatten(0, 1), rows=repeated.rows)
        named = {name: value.unflatten(0, (samples, -1)) for name, value in outputs.items()}
        atoms = torch.bincount(graph.rows["node"], minlength=graph.systems)
        return named | {"energy": named["energy"] + atoms * self._zero(noise)}

    def _zero(self, noise: Tensor) -> Tensor:
        """The zero of the energies for draws e (..., noise), in eV per atom."""
        z = functional.linear(noise.to(self.noise.mixing), self.noise.mixing)
        return (z @ self.energy_zero + 0.5 * (z @ self.energy_curvature * z).sum(-1)).double()

    def draw_for_training(self, samples: int, systems: int, generator: torch.Generator) -> Tensor:
        """An independent e for every sample of every system, (sample, system, noise)."""
        return noise.draw_for_training(samples, systems, self.noise.dim, generator=generator)

    def new_parameters(self) -> list[nn.Parameter]:
        return self.noise_parameters()

    def energy_parameters(self) -> list[nn.Parameter]:
        return [self.energy_zero]

    def fit_energy_zero(self, structures: Sequence[Atoms], *, curved: bool = True) -> None:
        """Take out of the samples' energies what is common to these structures and linear (or quadratic) in z.

        A parabola is fitted by gradients, each of which costs no more than a training step.
        """
        graphs = [(self.backbone.graph([atoms]), len(atoms)) for atoms in structures]

        def gradient(e: Tensor) -> Tensor:
            """That of the mean energy per atom, (sample, noise); in small passes, for it must not need more memory
            than a training step."""
            e = e.to(self.noise.mixing)
            sums = torch.zeros_like(e)
            for graph, atoms in graphs:
                for own, total in zip(*(x.split(max(1, ATOMS_IN_A_GRADIENT // atoms)) for x in (e, sums)), strict=True):
                    leaf = own.clone().requires_grad_()
                    with torch.enable_grad():
                        energy = self(graph, leaf)["energy"].sum() / atoms
                    total += torch.autograd.grad(energy, leaf)[0]
            return sums.double() / len(graphs)

        slope = parabola.fit_slope(gradient, self.noise.dim)
        curvature = parabola.fit_curvature(gradient, self.noise.dim).to(slope) if curved else None
        with torch.no_grad():
            to_z = torch.linalg.inv(self.noise.mixing.double())
            self.energy_zero.sub_((slope @ to_z).to(self.energy_zero))
            if curvature is not None:
                self.energy_curvature.sub_((to_z.T @ curvature @ to_z).to(self.energy_curvature))

    def responses(self, structures: Sequence[Atoms]) -> list[float]:
        return response.of_layers(self, structures)

    def rate_for_new(self, responses: Sequence[float], error: float) -> float:
        """0.4 % of the random noise weights with which the spread would be as large as the error.

        Potentials respond to noise very differently (Orb-v2 twenty times as strongly as CHGNet), so no one rate suits
        all. The share is what served Orb-v2 and CHGNet alike.
        """
        return 0.004 * max(response.weights_for(error, responses, balance=0.0))

    @property
    def usual_start(self) -> float:
        return 0.0 if self.trained else 1.0  # what was learned before must not be lost

    def start_at_random(self, spread: float, responses: Sequence[float], *, balance: float, seed: int) -> None:
        """Training then takes the spread away where there are data, and leaves it elsewhere."""
        self.energy_curvature.zero_()  # of what was there before
        self.randomise(response.weights_for(spread, responses, balance=balance), seed=seed)

    def sample(
        self,
        structures: Atoms | Iterable[Atoms],
        *,
        samples: int | None = None,
        seed: int = 0,
        chunk_atoms: int | None = None,
        progress: Progress | None = None,
        kind: str = "plain",
    ) -> Samples:
        """K samples for each structure, by default 16, on the CPU; see `pmlip.noise.draw` for the kinds of draws.

        chunk_atoms: how many atoms (times samples) to put through one pass; found by trial when it is not given.
        progress(done, all) is told how many structures are done.
        """
        draws = self.draw(self._count(samples), seed=seed, kind=kind)
        return self._samples(structures, draws, chunk_atoms, progress)

    def counterweights(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        return noise.counterweights(draws)

    def fold(self, *, sample: int, seed: int = 0, kind: str = "plain") -> Backbone:
        """Sample number `sample` as an ordinary backbone: its own calculator, its own file format."""
        folded = super().fold(sample=sample, seed=seed, kind=kind)
        assert isinstance(folded, Backbone)
        if zero := self._zero(self.draw(sample + 1, seed=seed, kind=kind)[sample]).item():
            folded.shift_all(zero)
        return folded

    def member(self, number: int, *, seed: int = 0) -> Backbone:
        return self.fold(sample=number, seed=seed)

    @torch.no_grad()
    def _scale_spread(self, factor: float) -> None:
        """Scale W_z, so that each sample stays a potential; the spread follows as far as the response is linear."""
        self.noise.mixing.mul_(factor)


@overload
def perturb(module: Backbone, *, noise_dim: int = 128, sites: Sites | None = None) -> Potential: ...


@overload
def perturb(module: nn.Module, *, noise_dim: int = 128, sites: Sites | None = None) -> Perturbed: ...


def perturb(module: nn.Module, *, noise_dim: int = 128, sites: Sites | None = None) -> Perturbed:
    """A copy of `module` with noise at its sites, computing exactly what the module does until it is trained.

    A backbone from `load_backbone` knows its sites and becomes a `Potential`. Any other module becomes a
    `Perturbed` and needs `sites`: names, glob patterns, `Site`s, or a function (name, module) -> bool. Sites must be
    layers that the module calls: a fused kernel that reads their weights instead passes the noise by.
    """
    if isinstance(module, Perturbed):
        raise ValueError("this model is perturbed already; perturb its original backbone instead")
    if sites is None and isinstance(module, Backbone):
        sites = module.sites()
    if sites is None:
        raise ValueError(
            f"{type(module).__name__} has no adapter, so pmlip cannot know its message and update MLPs; "
            "name them with sites=..."
        )
    return _perturbed(module, sites, noise_dim)


def load(
    path: str | Path,
    *,
    backbone: nn.Module | None = None,
    sites: Sites | None = None,
    weights: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> Any:
    """The model that `save` wrote to `path`, on the device asked for.

    A pretrained potential is found again by its name (with `weights` where it came from a local file); any
    other module must be handed in as `backbone`, and its `sites` too if they had envelopes. trust: see
    `load_backbone`.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"a model is loaded from a file, got a {type(path).__name__}; is it a potential?")
    content = checkpoint.read(path)
    if backbone is None:
        backbone = content.origin.load(weights=weights, trust=trust)
    content.origin.check(backbone)
    if (method := content.settings.get("method")) is not None:
        assert isinstance(backbone, Backbone)
        model: nn.Module = methods.make(method, backbone, **content.settings["options"])
    else:
        model = _perturbed(
            backbone, _stored_sites(path, content) if sites is None else sites, content.settings["noise_dim"]
        )
    # the precision of the network; a buffer may have one of its own
    weights_of = [content.state[name] for name, _ in model.named_parameters() if name in content.state]
    model.to(next((value.dtype for value in weights_of if value.is_floating_point()), torch.get_default_dtype()))
    state = dict(content.state)
    for name, part in model.named_modules():
        if isinstance(part, Potential):  # since format 2 and 3
            prefix = f"{name}." if name else ""
            state.setdefault(f"{prefix}energy_zero", torch.zeros_like(part.energy_zero))
            state.setdefault(f"{prefix}energy_curvature", torch.zeros_like(part.energy_curvature))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise checkpoint.CheckpointError(
            f"the weights in {path} do not fit this backbone: {first_reason(error)}"
        ) from error
    model.record = dict(content.record)  # type: ignore[assignment]  # not a part of the network
    return model.to(device)


def _stored_sites(path: str | Path, content: checkpoint.Checkpoint) -> list[Site]:
    stored = content.settings["sites"]
    if any(site["custom_envelope"] for site in stored):
        raise checkpoint.CheckpointError(f"{path} was made with envelopes of its own; pass sites=... again")
    return [Site(site["name"], site["rows"]) for site in stored]


def _perturbed(backbone: nn.Module, sites: Sites, noise_dim: int) -> Perturbed:
    if isinstance(backbone, Backbone):
        return Potential(backbone, find_sites(backbone.module, sites), noise_dim)
    return Perturbed(backbone, find_sites(backbone, sites), noise_dim)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """All tensors in nested containers and dataclasses."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)
    elif hasattr(outputs, "__dict__"):
        yield from _tensors(vars(outputs))
