"""Novelty: how unusual an atom is, compared with the training set of a model.

The features g of an atom are the gradients of the energy with respect to shifts at the sites (kind "gradients"), or
the latent features that enter the readout (kind "latent"). With H_Z the sum of g g^T over the training atoms of
element Z, the length of an atom is

    gamma = sqrt(g^T (H_Z + floor I)^-1 g)

The novelty of an atom is gamma divided by the 95 % quantile of gamma over held-out atoms. The novelty of a structure
is the root mean square gamma of its atoms, divided by the 95 % quantile over held-out structures. An atom whose
element is not in the training set has infinite novelty.

If the pass for the forces gives the gradients, they are the default. Otherwise latent features find unusual structures,
and gradients measure them, from one more pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from torch import Tensor, nn

from pmlip.backbones.base import Backbone, Graph, Readout, evaluating
from pmlip.curvature import Curvature, CurvatureSum
from pmlip.errors import did_you_mean
from pmlip.noise.injection import Site
from pmlip.noise.site_gradients import collect, sites_of
from pmlip.samples import Outputs, mean_per_system
from pmlip.spread_fit import best_power
from pmlip.structures.atoms import Progress, StructureError, as_structures, numbered_from, subsample, system_index
from pmlip.structures.labels import labels

NAMES = {"gradients": "site gradients", "latent": "latent features"}
KINDS = tuple(NAMES)
QUANTILE = 0.95
OUTSIDE = 1.5  # from here on, a structure lies outside the training set; held-out structures rarely reach it
FEWEST_HELD_OUT = 20  # structures for the quantile
MOST_LEFT_OUT = 200  # training structures to compare with all others, if too few structures are held out
LEFT_OUT = "training structures, each left out once"
ATOMS_IN_A_PASS = 128

Layer = Site | Readout


@dataclass(frozen=True, eq=False)
class Novelty:
    """The novelty of atoms and structures; 1 is the 95 % quantile of held-out atoms and structures."""

    atom: Tensor  # (atom,)
    structure: Tensor  # (system,)
    largest: Tensor  # (system,) largest gamma of an atom; 1 is the 95 % quantile of held-out structures
    outside: Tensor  # (system,) whether the structure, or one of its atoms, is far above what was held out
    sigma: Tensor  # (atom,) eV/Å, standard deviation of the error of each force component; NaN if it was not fitted
    predicted: Outputs  # the prediction without noise, from the same pass
    kinds: Sequence[str]  # (system,) features that each structure was measured by, "gradients" or "latent"
    latent: "Novelty | None" = None  # by latent features, if site gradients then measured some structures again

    @property
    def system(self) -> Tensor:
        """Index of the structure that each atom belongs to, (atom,)."""
        return self.predicted.system

    @property
    def unusual(self) -> Tensor:
        """Whether the structure, or one of its atoms, is above the 95 % quantile of held-out structures, (system,)."""
        return (self.structure > 1) | (self.largest > 1)

    def explain(self, index: int, atoms: Atoms) -> str:
        """One sentence about the novelty of structure `index`, which is `atoms`."""
        own = self.atom[self.system == index]
        most = int(own.argmax())
        if bool(own.isinf().any()):
            return (
                f"atom {most} ({atoms[most].symbol}) has an element that the training set lacks, or no neighbours: its "
                "error bar is unknown"
            )
        also = ""
        if self.latent is not None and self.kinds[index] == "gradients":
            also = f" by site gradients and {float(self.latent.structure[index]):.1f} by latent features"
        return (
            f"its novelty is {float(self.structure[index]):.1f}{also}, where 95 % of held-out structures are below 1; "
            f"the most unusual atom is {most} ({atoms[most].symbol}) with {float(own[most]):.1f}"
        )


@dataclass(frozen=True, eq=False)
class TrainingFeatures:
    """What novelty keeps of a training set: one curvature per element, and the scale of novelty."""

    kind: str  # "gradients" or "latent"
    curvatures: Mapping[int, Curvature]  # atomic number -> curvature of the features
    sources: Sequence[str]  # layers that the features come from
    structures: int  # number of training structures
    atom_quantile: float = 1.0
    structure_quantile: float = 1.0
    largest_quantile: float = 1.0  # of the largest gamma in each structure
    scaled_on: str = "nothing"  # the structures that the quantiles come from
    log_width: float = float("nan")  # a and b of sigma = exp(a) novelty^b, in eV/Å
    exponent: float = float("nan")

    def lengths(self, features: Tensor, numbers: Tensor) -> Tensor:
        """gamma of each atom, (atom,). It is infinite for elements that are not in the training set, and for atoms
        without neighbours, whose features are all zero."""
        self._check_width(features)
        found = torch.full((len(features),), torch.inf, dtype=torch.float64)
        for own, curvature in self._elements(numbers):
            found[own] = curvature.length(features[own])
        return found.masked_fill((features == 0).all(1), torch.inf)

    def lengths_left_out(self, features: Tensor, numbers: Tensor) -> Tensor:
        """gamma of the atoms of one training structure if it had not been in the training set."""
        found = torch.full((len(features),), torch.inf, dtype=torch.float64)
        for own, curvature in self._elements(numbers):
            found[own] = curvature.length_left_out(features[own])
        return found

    def novelty(self, lengths: Tensor, predicted: Outputs) -> Novelty:
        atom = lengths / self.atom_quantile
        structure = _root_mean_square(lengths, predicted.system) / self.structure_quantile
        largest = _largest(lengths, predicted.system) / self.largest_quantile
        outside = (structure > OUTSIDE) | (largest > OUTSIDE)
        return Novelty(atom, structure, largest, outside, self.sigma(atom), predicted, [self.kind] * len(structure))

    def sigma(self, novelty: Tensor) -> Tensor:
        """Standard deviation of the error of each force component of atoms with this novelty, in eV/Å."""
        return (float(np.exp(self.log_width)) * novelty**self.exponent).masked_fill(novelty.isinf(), torch.inf)

    def scaled(self, lengths: Tensor, structures: Sequence[Atoms], *, name: str) -> Self:
        """The same features, with 1 as the 95 % quantile of these structures, whose atoms have these lengths."""
        system = system_index(structures)
        measures = [lengths, _root_mean_square(lengths, system), _largest(lengths, system)]
        known = [values[values.isfinite()] for values in measures]
        if not len(known[1]):
            raise ValueError(
                f"novelty cannot be scaled on {name}: each structure has an element that the training set lacks"
            )
        atom, structure, largest = (float(values.quantile(QUANTILE)) for values in known)
        return replace(self, atom_quantile=atom, structure_quantile=structure, largest_quantile=largest, scaled_on=name)

    def with_error_bars(self, atom_novelty: Tensor, force_errors: Tensor) -> Self:
        """The same features, with error bars fitted to force errors (atom, 3); without labels, they stay as before."""
        known = force_errors.isfinite().all(1) & atom_novelty.isfinite()
        if not known.any():
            return self
        units = atom_novelty[known, None].expand(-1, 3).numpy()
        log_width, exponent = best_power(force_errors[known].numpy().ravel(), units.ravel())
        return replace(self, log_width=log_width, exponent=exponent)

    def to_record(self) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint."""
        curvatures = {number: vars(curvature) for number, curvature in self.curvatures.items()}
        return {**vars(self), "sources": list(self.sources), "curvatures": curvatures}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        curvatures = {number: Curvature(**one) for number, one in record["curvatures"].items()}
        return cls(**{**record, "curvatures": curvatures})

    def describe(self) -> str:
        """One sentence about the training set, the scale and the error bars."""
        elements = ", ".join(chemical_symbols[number] for number in self.curvatures)
        bars = ""
        if np.isfinite(self.log_width):
            bars = f"; at novelty 1, the force error bar is {1e3 * np.exp(self.log_width):.0f} meV/Å"
        return (
            f"novelty by {NAMES[self.kind]}: 1 is the 95 % quantile of {self.scaled_on}, compared with "
            f"{self.structures} training structures ({elements}){bars}"
        )

    def layers(self, backbone: Backbone) -> Sequence[Layer]:
        """The layers of this backbone that the features come from; raises ValueError if it has other layers."""
        own = _layers(backbone, self.kind)
        if [layer.name for layer in own] != list(self.sources):
            raise ValueError(
                f"these training features come from the layers {', '.join(self.sources)}, but this model has "
                f"{', '.join(layer.name for layer in own)}; fit them again with model.fit_novelty"
            )
        return own

    def _check_width(self, features: Tensor) -> None:
        fitted = len(next(iter(self.curvatures.values())).centre)
        if features.shape[1] != fitted:
            raise ValueError(
                f"these training features have {fitted} features per atom, but this model has {features.shape[1]}; fit "
                "them again with model.fit_novelty"
            )

    def _elements(self, numbers: Tensor) -> Iterator[tuple[Tensor, Curvature]]:
        for number, curvature in self.curvatures.items():
            own = (numbers.cpu() == number).nonzero()[:, 0]
            if len(own):
                yield own, curvature


def default_kind(backbone: Backbone) -> str:
    """The kind that costs no extra pass: gradients if the pass for the forces gives them, otherwise latent features."""
    return "gradients" if backbone.conservative else "latent"


def features(backbone: Backbone, graph: Graph, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the features of the atoms (atom, feature) and the outputs of the backbone, from one pass.

    Gradients need a backward pass of the energy. For conservative potentials it is the pass that gives the forces.
    """
    return _FEATURES[kind](backbone, graph, _layers(backbone, kind))


def _site_gradients(backbone: Backbone, graph: Graph, sites: Sequence[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    nodes = graph.rows["node"]
    atom_of_row = {"node": torch.arange(len(nodes), device=nodes.device), **backbone.atom_of_row(graph)}
    with torch.no_grad(), collect(backbone.module, sites, atom_of_row) as gradients:
        if backbone.conservative:
            outputs = backbone(graph)
        else:
            with torch.enable_grad():
                outputs = backbone(graph)
                torch.autograd.grad(outputs["energy"].sum(), gradients.outputs, allow_unused=True)
    return gradients.per_atom, {name: value.detach() for name, value in outputs.items()}


def _latent_features(backbone: Backbone, graph: Graph, readouts: Sequence[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    seen: list[Tensor] = []

    def keep(readout: Readout) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: seen.append(inputs[0].detach()[:, : readout.scalars])

    hooks = [
        backbone.module.get_submodule(readout.name).register_forward_pre_hook(keep(readout)) for readout in readouts
    ]
    try:
        with torch.no_grad():
            outputs = backbone(graph)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(seen, 1), outputs


_FEATURES = {"gradients": _site_gradients, "latent": _latent_features}


def _layers(backbone: Backbone, kind: str) -> Sequence[Layer]:
    return sites_of(backbone.module, backbone.sites()) if kind == "gradients" else backbone.readouts()


def lengths(backbone: Backbone, graph: Graph, training: TrainingFeatures) -> tuple[Tensor, dict[str, Tensor]]:
    """Return gamma of each atom of a batch (atom,), and the outputs of the backbone."""
    found, outputs = _FEATURES[training.kind](backbone, graph, training.layers(backbone))
    return training.lengths(found.cpu(), graph.numbers), outputs


def combined(latent: Novelty, gradients: Novelty) -> Novelty:
    """The novelty by latent features, with unusual structures replaced by their novelty by site gradients.

    gradients: of the unusual structures alone. A structure lies outside the training set if either kind says so.
    """
    systems, atoms = latent.unusual, latent.unusual[latent.system]
    return Novelty(
        atom=latent.atom.masked_scatter(atoms, gradients.atom),
        structure=latent.structure.masked_scatter(systems, gradients.structure),
        largest=latent.largest.masked_scatter(systems, gradients.largest),
        outside=latent.outside | latent.outside.masked_scatter(systems, gradients.outside),
        sigma=latent.sigma.masked_scatter(atoms, gradients.sigma),
        predicted=latent.predicted,
        kinds=["gradients" if unusual else "latent" for unusual in systems.tolist()],
        latent=latent,
    )


def fit(
    backbone: Backbone,
    train: Sequence[Atoms],
    *,
    valid: Sequence[Atoms] = (),
    kind: str | None = None,
    progress: Progress | None = None,
) -> TrainingFeatures:
    """The curvatures of the training structures, and the scale of novelty from held-out structures `valid`.

    With fewer than 20 held-out structures, the scale comes from training structures, each compared with all others.
    Error bars are fitted to the held-out structures with force labels. Training structures are read one batch at a
    time. progress(done, total) counts structures.
    """
    kind = kind or default_kind(backbone)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got kind={kind!r}{did_you_mean(kind, KINDS)}")
    train, valid = as_structures(train) if len(train) else [], as_structures(valid) if len(valid) else []
    if len(train) < 2:
        raise ValueError(f"novelty compares structures with a training set of at least 2, got {len(train)}")
    left_out = [] if len(valid) >= FEWEST_HELD_OUT else subsample(train, MOST_LEFT_OUT)
    passes = _Passes(backbone, kind, len(train) + len(left_out) + len(valid), progress)
    sums: dict[int, CurvatureSum] = {}
    with evaluating(backbone):
        for found, numbers, _ in passes.over(train):
            for number in numbers.unique().tolist():
                own = sums.setdefault(number, CurvatureSum(found.shape[1], centred=kind == "latent"))
                own.add(found[numbers == number])
        fitted = TrainingFeatures(
            kind=kind,
            curvatures={number: own.curvature() for number, own in sorted(sums.items())},
            sources=[layer.name for layer in _layers(backbone, kind)],
            structures=len(train),
        )
        if left_out:
            alone = [fitted.lengths_left_out(found, numbers) for found, numbers, _ in passes.over(left_out, one=True)]
            fitted = fitted.scaled(torch.cat(alone), left_out, name=LEFT_OUT)
        return _on_held_out(fitted, valid, passes) if valid else fitted


def rescale(
    backbone: Backbone, training: TrainingFeatures, valid: Sequence[Atoms], *, progress: Progress | None = None
) -> TrainingFeatures:
    """The same curvatures with the scale and the error bars from other held-out structures.

    With fewer than 20 structures, only the error bars change.
    """
    listed = as_structures(valid)
    with evaluating(backbone):
        return _on_held_out(training, listed, _Passes(backbone, training.kind, len(listed), progress))


def _on_held_out(training: TrainingFeatures, valid: list[Atoms], passes: "_Passes") -> TrainingFeatures:
    lengths, predicted = [], []
    for found, numbers, forces in passes.over(valid):
        lengths.append(training.lengths(found, numbers))
        predicted.append(forces)
    gamma = torch.cat(lengths)
    if len(valid) >= FEWEST_HELD_OUT:
        training = training.scaled(gamma, valid, name=f"{len(valid)} held-out structures")
    errors = torch.cat(predicted).double() - labels(valid).forces
    return training.with_error_bars(gamma / training.atom_quantile, errors)


class _Passes:
    """Passes of a backbone over structures, with a count of the finished structures."""

    def __init__(self, backbone: Backbone, kind: str, total: int, progress: Progress | None) -> None:
        self._backbone, self._kind, self._total, self._progress = backbone, kind, total, progress
        self._done = 0

    def over(self, structures: list[Atoms], *, one: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Features, atomic numbers and predicted forces, on the CPU; one: of one structure after the other."""
        for start, batch in _batches(structures, 1 if one else ATOMS_IN_A_PASS):
            with numbered_from(start):
                graph = self._backbone.graph(batch)
                found, outputs = features(self._backbone, graph, self._kind)
                refuse_nan(found.cpu(), batch)
            yield found.cpu(), graph.numbers.cpu(), outputs["forces"].cpu()
            self._done += len(batch)
            if self._progress:
                self._progress(self._done, self._total)


def refuse_nan(rows: Tensor, structures: Sequence[Atoms]) -> None:
    """Raise a StructureError if the features or gamma of an atom, (atom, ...), are NaN."""
    bad = rows.flatten(1).isnan().any(1).nonzero() if rows.dim() > 1 else rows.isnan().nonzero()
    if len(bad):
        index = int(system_index(structures)[bad[0, 0]])
        raise StructureError(
            structures[index],
            index,
            "its novelty is NaN; check for overlapping atoms, and that training did not diverge",
        )


def _batches(structures: list[Atoms], most_atoms: int) -> Iterator[tuple[int, list[Atoms]]]:
    """Consecutive structures with at most this many atoms together, or one structure; with the index of the first."""
    start = 0
    while start < len(structures):
        stop, atoms = start + 1, len(structures[start])
        while stop < len(structures) and atoms + len(structures[stop]) <= most_atoms:
            atoms += len(structures[stop])
            stop += 1
        yield start, structures[start:stop]
        start = stop


def _largest(values: Tensor, system: Tensor) -> Tensor:
    """Largest value of the atoms of each structure, (system,)."""
    return values.new_zeros(int(system[-1]) + 1).scatter_reduce(0, system, values, "amax")


def _root_mean_square(values: Tensor, system: Tensor) -> Tensor:
    """Root mean square over the atoms of each structure, (system,)."""
    return mean_per_system(values.square()[:, None], system, int(system[-1]) + 1).sqrt()
