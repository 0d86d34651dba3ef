"""P, learned functional perturbations: noise at the sites of a potential, trained by the fair CRPS of K samples."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from ase import Atoms
from torch import Tensor, nn
from torch.nn import functional

from pmlip.backbones.base import Backbone, Graph
from pmlip.methods import _energy_zero, _response
from pmlip.methods.base import Initialisation, Learner, Method
from pmlip.noise import draws as noise_draws
from pmlip.noise.injection import Site, Sites, find_sites
from pmlip.perturbed import Perturbed
from pmlip.samples import Samples
from pmlip.structures.atoms import Progress, as_structures, subsample
from pmlip.tangent import Tangent, fit

ATOMS_IN_A_GRADIENT = 64  # atoms times samples per pass that computes gradients with respect to the noise
ATOMS_IN_A_PASS = 256  # atoms times samples per pass of the learned part, if there is a tangent part
STRUCTURES_FOR_ZERO = 2  # enough, since all structures share the energy offset of a sample
TANGENT_STREAM = 2**31  # of the draws


class Potential(Perturbed, Method):
    """A perturbed interatomic potential. Sample k is the same potential for every structure.

    Each sample has its own energy offset per atom, v . z + z . C z / 2, which leaves forces unchanged. It is needed
    because noise that changes forces shifts all energies together by much more than it changes their differences.

    With a tangent (`pmlip.tangent`), a draw is the noise e followed by the draw of the tangent part.
    """

    name = "p"
    backbone: Backbone
    energy_curvature: Tensor  # C
    tangent: Tangent | None
    save = Method.save

    def __init__(self, backbone: Backbone, sites: tuple[Site, ...], noise_dim: int) -> None:
        super().__init__(backbone, sites, noise_dim)
        self.energy_zero = nn.Parameter(torch.zeros_like(self.noise.w_z[0]))  # v
        self.register_buffer("energy_curvature", torch.zeros_like(self.noise.w_z.detach()))
        self.tangent = None

    def forward(self, graph: Graph, noise: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]  # narrower arguments
        """Outputs with the sample axis first, for noise (sample, noise) or (sample, system, noise); None: no noise.

        Rows (sample, noise + tangent) add the tangent part.
        """
        noise = torch.zeros(1, self.noise.dim) if noise is None else noise
        if self.tangent is not None and noise.dim() == 2 and noise.shape[1] == self.noise.dim + self.tangent.dim:
            return self._with_tangent(graph, noise, self.tangent)
        if noise.dim() == 2:
            noise = noise[:, None].expand(-1, graph.systems, -1)
        if noise.dim() != 3 or noise.shape[1:] != (graph.systems, self.noise.dim):
            raise ValueError(
                f"noise for a batch of {graph.systems} structures must have shape (sample, {self.noise.dim}) or "
                f"(sample, {graph.systems}, {self.noise.dim}), got {tuple(noise.shape)}"
            )
        samples = len(noise)
        repeated = self.backbone.repeat(graph, samples)
        outputs = super().forward(repeated, noise=noise.flatten(0, 1), rows=repeated.rows)
        named = {name: value.unflatten(0, (samples, -1)) for name, value in outputs.items()}
        atoms = torch.bincount(graph.rows["node"], minlength=graph.systems)
        return named | {"energy": named["energy"] + atoms * self._zero(noise)}

    def _with_tangent(self, graph: Graph, draws: Tensor, tangent: Tangent) -> dict[str, Tensor]:
        noise, free = draws.split([self.noise.dim, tangent.dim], 1)
        if not tangent.active:
            return self(graph, noise)
        at_once = max(1, ATOMS_IN_A_PASS // len(graph.rows["node"]))
        parts = [self(graph, some) for some in noise.split(at_once)]
        changes = tangent.changes(self.backbone, graph, free)
        return {name: torch.cat([part[name] for part in parts]) + changes[name].to(parts[0][name]) for name in changes}

    def _zero(self, noise: Tensor) -> Tensor:
        """Energy offset in eV per atom for draws e (..., noise)."""
        z = functional.linear(noise.to(self.noise.w_z), self.noise.w_z)
        return (z @ self.energy_zero + 0.5 * (z @ self.energy_curvature * z).sum(-1)).double()

    def fit_energy_zero(self, structures: Sequence[Atoms], *, curved: bool = True) -> None:
        """Fit v (and C if `curved`), which set the energy offsets of the samples.

        The mean energy per atom over the structures then no longer depends on z to first (second) order.
        """
        graphs = [(self.backbone.graph([atoms]), len(atoms)) for atoms in structures]

        def gradient(e: Tensor) -> Tensor:
            """Gradient of the mean energy per atom, (sample, noise), in passes no larger than a training step."""
            e = e.to(self.noise.w_z)
            sums = torch.zeros_like(e)
            for graph, atoms in graphs:
                for own, total in zip(*(x.split(max(1, ATOMS_IN_A_GRADIENT // atoms)) for x in (e, sums)), strict=True):
                    leaf = own.clone().requires_grad_()
                    with torch.enable_grad():
                        energy = self(graph, leaf)["energy"].sum() / atoms
                    total += torch.autograd.grad(energy, leaf)[0]
            return sums.double() / len(graphs)

        slope = _energy_zero.fit_slope(gradient, self.noise.dim)
        curvature = _energy_zero.fit_curvature(gradient, self.noise.dim).to(slope) if curved else None
        with torch.no_grad():
            to_z = torch.linalg.inv(self.noise.w_z.double())
            self.energy_zero.sub_((slope @ to_z).to(self.energy_zero))
            if curvature is not None:
                self.energy_curvature.sub_((to_z.T @ curvature @ to_z).to(self.energy_curvature))

    def fit_tangent(
        self, train: Iterable[Atoms], *, cover: str | None = None, progress: Progress | None = None
    ) -> None:
        """Add tangent samples, whose spread rises out of distribution; train: the training structures, with forces.

        A sample then costs about three passes. Call `pmlip.calibrate` afterwards, which fits the width. cover: see
        `pmlip.tangent.fit`. progress(done, total) counts structures.
        """
        self.tangent = fit(self.backbone, as_structures(train), cover=cover, progress=progress)
        self.calibration = None

    def learner(self) -> "PotentialLearner":
        return PotentialLearner(self)

    def settings(self) -> dict[str, Any]:
        return self.stored_settings()

    @property
    def in_turn(self) -> bool:  # type: ignore[override]  # read-only
        return not self.members_are_whole

    @property
    def members_are_whole(self) -> bool:
        return self.tangent is None or not self.tangent.active

    def draw(self, samples: int, *, seed: int = 0, kind: str = "plain", first: int = 0) -> Tensor:
        drawn = super().draw(samples, seed=seed, kind=kind, first=first)
        if self.tangent is None:
            return drawn
        kind = "antithetic" if kind == "antithetic" else "plain"
        free = noise_draws.draw(samples, self.tangent.dim, seed=seed, kind=kind, stream=TANGENT_STREAM, first=first)
        return torch.cat([drawn, free], 1)

    def draw_number(self, number: int, *, seed: int = 0) -> Tensor:
        return self.draw(1, seed=seed, first=number)

    def passes(self, samples: int) -> int:
        return super().passes(samples) * (1 if self.members_are_whole else 3)

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

        chunk_atoms: atoms times samples per forward pass; by default tuned for speed at run time.
        progress(done, total) counts structures.
        """
        draws = self.draw(self._count(samples), seed=seed, kind=kind)
        return self._samples(structures, draws, chunk_atoms, progress)

    def counterweights(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        return noise_draws.counterweights(draws)

    def fold(self, *, sample: int, seed: int = 0, kind: str = "plain") -> Backbone:
        """Sample number `sample` as a plain backbone, with the calculator and file format of its package.

        It leaves out the tangent part of the sample, which no ordinary potential can hold: the difference of two
        potentials gives it only roughly in single precision. `PMLIPCalculator.members` and `propagate` include it.
        """
        folded = super().fold(sample=sample, seed=seed, kind=kind)
        assert isinstance(folded, Backbone)
        drawn = noise_draws.draw(1, self.noise.dim, seed=seed, kind=kind, first=sample)
        if zero := self._zero(drawn[0]).item():
            folded.shift_all(zero)
        return folded

    def member(self, number: int, *, seed: int = 0) -> Backbone:
        return self.fold(sample=number, seed=seed)

    @torch.no_grad()
    def _scale_spread(self, factor: float) -> None:
        """Scale W_z, so that each sample remains a potential; exact where the response to noise is linear."""
        self.noise.w_z.mul_(factor)
        if self.tangent is not None:
            self.tangent.width.mul_(factor)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # children are loaded after this, so they can be created here
        self.tangent = Tangent.stored(state_dict, f"{prefix}tangent.")
        if self.tangent is not None:  # before format 6, tangents change parameters only
            state_dict.setdefault(f"{prefix}tangent.scales", torch.tensor([0.0, 1.0], dtype=torch.float64))
        for name in ("energy_zero", "energy_curvature"):  # missing in checkpoint formats 1 and 2
            state_dict.setdefault(f"{prefix}{name}", torch.zeros_like(getattr(self, name)))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class PotentialLearner(Learner):
    trains_on_samples = True
    calibrated_after = True
    model: Potential

    def draw(self, samples: int, systems: int, generator: torch.Generator) -> Tensor:
        """An independent e for every sample of every system, (sample, system, noise)."""
        return noise_draws.draw_for_training(samples, systems, self.model.noise.dim, generator=generator)

    def new_parameters(self) -> list[nn.Parameter]:
        return self.model.noise_parameters()

    def energy_parameters(self) -> list[nn.Parameter]:
        return [self.model.energy_zero]

    def initialise(self, structures: Sequence[Atoms], how: Initialisation) -> float:
        """Set random noise weights that give a spread equal to the error, unless the model has noise weights already.

        Training then reduces the spread where there are data. The default learning rate is 0.4 % of w, where
        noise weights of standard deviation w in every layer give a spread equal to the error. This fraction works for
        Orb-v2 and for CHGNet, although Orb-v2 responds to noise twenty times as strongly.
        """
        model = self.model
        default = 0.0 if model.trained else 1.0
        start = default if how.start is None else how.start
        responses = _response.of_layers(model, structures) if start or how.rate is None else []
        rate = how.rate or 0.004 * max(_response.weights_for(how.error, responses, balance=0.0))
        if start:
            model.energy_curvature.zero_()  # it was fitted to the old noise weights
            model.randomise(
                _response.weights_for(start * how.error, responses, balance=how.balance),
                seed=how.seed,
            )
            if how.learns_energy:  # no curvature: it is a buffer, which the optimiser does not update
                self.fit_energy_zero(structures, curved=False)
        return rate

    def fit_tangents(
        self, train: Sequence[Atoms], *, cover: str | None = None, progress: Progress | None = None
    ) -> bool:
        self.model.fit_tangent(train, cover=cover, progress=progress)
        return True

    def forget_tangents(self) -> None:
        self.model.tangent = None

    def fit_energy_zero(self, structures: Sequence[Atoms], *, curved: bool) -> bool:
        # skip isolated atoms unless there is nothing else
        molecules = [atoms for atoms in structures if len(atoms) > 1] or structures
        self.model.fit_energy_zero(subsample(molecules, STRUCTURES_FOR_ZERO), curved=curved)
        return True


@overload
def perturb(module: Backbone, *, noise_dim: int = 128, sites: Sites | None = None) -> Potential: ...


@overload
def perturb(module: nn.Module, *, noise_dim: int = 128, sites: Sites | None = None) -> Perturbed: ...


def perturb(module: nn.Module, *, noise_dim: int = 128, sites: Sites | None = None) -> Perturbed:
    """A copy of `module` with noise at its sites. Before training, its outputs equal the outputs of the module exactly.

    A backbone from `load_backbone` knows its sites and becomes a `Potential`. Any other module becomes a `Perturbed`
    and needs `sites`: names, glob patterns, `Site`s, or a function (name, module) -> bool. The module must call the
    layers at its sites: a fused kernel that reads their weights directly bypasses the noise.
    """
    if isinstance(module, Perturbed):
        raise ValueError("this model is perturbed already; perturb its original backbone instead")
    if sites is None and isinstance(module, Backbone):
        sites = module.sites()
    if sites is None:
        raise ValueError(
            f"{type(module).__name__} has no adapter, so pmlip does not know its message and update MLPs; "
            "name them with sites=..."
        )
    return perturb_at(module, sites, noise_dim)


def perturb_at(backbone: nn.Module, sites: Sites, noise_dim: int) -> Perturbed:
    if isinstance(backbone, Backbone):
        return Potential(backbone, _with_known_rows(find_sites(backbone.module, sites), backbone), noise_dim)
    return Perturbed(backbone, find_sites(backbone, sites), noise_dim)


def _with_known_rows(sites: Sequence[Site], backbone: Backbone) -> tuple[Site, ...]:
    """The sites, with the kind of row and the envelope that the adapter knows for sites given by name alone."""
    known = {site.name: site for site in find_sites(backbone.module, backbone.sites())}
    return tuple(
        replace(site, rows=known[site.name].rows, envelope=site.envelope or known[site.name].envelope)
        if site.name in known and site.rows == Site(site.name).rows
        else site
        for site in sites
    )


def make(backbone: Backbone, *, noise_dim: int = 128) -> Potential:
    return perturb(backbone, noise_dim=noise_dim)
