"""Tangent samples: linear changes of a potential along the directions that the training forces leave open.

The weights w of the potential become w + S x, where the sketch S adds each entry of x to many weights. Shifts of the
outputs of the sites, where the noise enters, can be among these weights. With J the derivative of an output with
respect to x at x = 0, and H the sum of J^T J over the training labels, sample k gains

    width J u_k,    u_k ~ N(0, (H + floor I)^-1)

H sums over forces, and over energies per atom in units of their error relative to the error of the forces. Directions
that change the training forces or energies are narrow, all others are wide. So this part of the spread is small on
structures like the training set and rises elsewhere. The energy that it adds is width u_k . dE/dx, and forces and
stress are its exact derivatives, so each sample remains a potential. A finite change of the weights by `width u` would
not do: the open directions are so wide that the response is far from linear.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor, nn

from pmlip.backbones.base import Backbone, Graph, evaluating, stress_of, watch_energies
from pmlip.curvature import CurvatureSum
from pmlip.errors import did_you_mean
from pmlip.noise.site_gradients import shifted, sites_of
from pmlip.structures.atoms import Progress, StructureError, as_structures, numbered_from, subsample
from pmlip.structures.labels import labels

DIMENSIONS = 2048  # of x
# The weights that x changes. "shifts" are shifts of the outputs of the sites; the others are parameters.
COVERS = ("all", "sites", "readout", "shifts", "sites+readout", "shifts+readout", "shifts+all")
REGULARISATION = 1e-3  # floor, as a multiple of the mean eigenvalue of H; 1e-2 to 1e-6 give nearly the same samples
# Random combinations of the forces of a structure whose derivatives are summed: 16 are enough for a hundred
# structures. Larger training sets need fewer for each, because all of them add up.
MOST_PROBES, FEWEST_PROBES, PROBES_IN_ALL = 16, 4, 8192
MOST_STRUCTURES = PROBES_IN_ALL // FEWEST_PROBES  # of a larger training set, as many are used
STRUCTURES_TO_BALANCE = 16  # to scale two groups of weights
ATOMS_IN_A_BACKWARD_PASS = 64  # atoms times probes; passes of small structures take several probes at once


class Tangent(nn.Module):
    """The distribution of the changes x of one potential. Sample k is identified by a draw, (dim,) normal numbers."""

    vectors: Tensor  # (rank, dim), largest eigenvectors of H
    values: Tensor  # (rank,) eigenvalues of H + floor I; all other directions have the eigenvalue `floor`
    floor: Tensor
    energy_slope: Tensor  # (dim,) eV per atom: derivative of the mean energy per atom of the training structures
    covered: Tensor  # (parameter,) whether the sketch changes this parameter of the backbone
    scales: Tensor  # (2,) of the sketch, for shifts and for parameters; 0: it does not change them
    width: Tensor  # of the samples; 0: no tangent part

    def __init__(self, rank: int, covered: int, *, dim: int = DIMENSIONS) -> None:
        super().__init__()
        for name, size in {"vectors": (rank, dim), "values": (rank,), "energy_slope": (dim,)}.items():
            self.register_buffer(name, torch.zeros(size))
        for name in ("floor", "width"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("covered", torch.zeros(covered, dtype=torch.bool))
        self.register_buffer("scales", torch.zeros(2, dtype=torch.float64))
        self._sketch: Sketch | None = None

    @property
    def dim(self) -> int:
        return self.vectors.shape[1]

    @property
    def active(self) -> bool:
        return bool(self.width > 0)

    def direction(self, draw: Tensor) -> Tensor:
        """u = (H + floor I)^-1/2 draw for a draw (dim,), in double precision."""
        draw, vectors = draw.to(self.vectors.device, torch.float64), self.vectors.double()
        floor = self.floor.double()
        scale = self.values.double().rsqrt() - floor.rsqrt()
        return (scale * (vectors @ draw)) @ vectors + floor.rsqrt() * draw

    def changes(self, backbone: Backbone, graph: Graph, draws: Tensor) -> dict[str, Tensor]:
        """The tangent part of the outputs for each draw (sample, dim), with the sample axis first.

        The mean change of the energy per atom over the training set is subtracted, because no force depends on it. One
        pass is shared by all samples; each sample then takes one more backward pass.
        """
        atoms = torch.bincount(graph.rows["node"], minlength=graph.systems)
        samples = []
        with self.changed(backbone) as groups, torch.enable_grad():
            weights = [weight for group in groups for weight in group]
            if self._sketch is None or self._sketch.device != weights[0].device:
                self._sketch = self.sketch(groups)
            linear = _Linearised(backbone, graph, weights)
            for draw in draws:
                x = self.width.double() * self.direction(draw)
                change = linear.along(self._sketch.spread(x))
                common = (self.energy_slope.double() @ x).to(change["energy"])
                samples.append(change | {"energy": change["energy"] - atoms * common})
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def changed(self, backbone: Backbone) -> contextlib.AbstractContextManager[list[list[Tensor]]]:
        """Inside the block, outputs can be differentiated by the groups of weights that the sketch changes."""
        return _changed(backbone, self.covered.tolist(), shifts=bool(self.scales[0] > 0))

    def sketch(self, groups: Sequence[Sequence[Tensor]]) -> "Sketch":
        return Sketch(groups, self.scales[self.scales > 0].tolist(), self.dim)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sketch": None}  # large; copies make it again

    @classmethod
    def stored(cls, state: dict[str, Any], prefix: str) -> "Tangent | None":
        """A Tangent with the sizes of a state dict that holds its tensors under this prefix; None if it holds none."""
        if f"{prefix}vectors" not in state:
            return None
        rank, dim = state[f"{prefix}vectors"].shape
        return cls(rank, len(state[f"{prefix}covered"]), dim=dim)


class _Linearised:
    """The outputs of a potential as a linear function of changes of its weights.

    A backward pass gives the derivatives by the weights, multiplied by factors of 1 that the outputs get for this
    purpose. A second one, of these derivatives along a change of the weights, gives the change of each output as the
    derivative by its factor. The forces and stress of a conservative potential are derivatives by positions and strain.
    """

    def __init__(self, backbone: Backbone, graph: Graph, weights: Sequence[Tensor]) -> None:
        with watch_energies() as seen:
            outputs = backbone(graph)
        self._energies = seen[0] if seen else None
        named = {"energy": outputs["energy"]} if seen else outputs
        self._factors = {name: torch.ones_like(value).requires_grad_() for name, value in named.items()}
        total = sum((value * self._factors[name]).sum() for name, value in named.items())
        self._slopes = torch.autograd.grad(total, weights, create_graph=True, materialize_grads=True)
        self._has_stress = "stress" in outputs

    def along(self, change: Sequence[Tensor]) -> dict[str, Tensor]:
        """The change of each output for this change of each weight."""
        inputs = list(self._factors.values())
        if self._energies is not None:
            inputs += [self._energies.positions, self._energies.strain]
        along = [part.to(slope) for part, slope in zip(change, self._slopes, strict=True)]
        found = torch.autograd.grad(
            self._slopes, inputs, along, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        changes = dict(zip(self._factors, found, strict=False))
        if self._energies is not None:
            gradient, virial = found[-2:]
            changes["forces"] = -gradient
            if self._has_stress:
                changes["stress"] = stress_of(virial, self._energies.volume)
        return changes


class Sketch:
    """S: adds each entry of x to many weights, with random signs that never change.

    Each group of weights has an equal share of the entries, and its own scale.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], scales: Sequence[float], dim: int) -> None:
        self._shapes, self._dim = [weight.shape for group in groups for weight in group], dim
        random = np.random.default_rng(0)
        self.device = groups[0][0].device
        entries, factors, share = [], [], dim // len(groups)
        for number, (group, scale) in enumerate(zip(groups, scales, strict=True)):
            count = sum(weight.numel() for weight in group)
            entries.append(number * share + random.integers(share, size=count, dtype=np.int32))
            factors.append(np.float32(scale) * (random.integers(2, size=count, dtype=np.int8) * np.float32(2) - 1))
        self._entry = torch.from_numpy(np.concatenate(entries)).to(self.device)
        self._factor = torch.from_numpy(np.concatenate(factors)).to(self.device)

    def gather(self, gradients: Sequence[Tensor]) -> Tensor:
        """S^T g: the derivative with respect to x, (dim,), from the derivatives with respect to the weights."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).double()
        return flat.new_zeros(self._dim).index_add_(0, self._entry, flat * self._factor)

    def spread(self, x: Tensor) -> list[Tensor]:
        """S x: the change of each weight."""
        flat = x.float().index_select(0, self._entry) * self._factor
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def weights_of(backbone: Backbone) -> list[tuple[str, nn.Parameter]]:
    """Names and values of all parameters of the potential itself, without the parameters of its noise."""
    return [(name, weight) for name, weight in backbone.named_parameters() if not name.endswith("noise_weight")]


def tangents_of(model: nn.Module) -> list[Tangent]:
    """The tangent distributions of a model: one for P, one for each member of an ensemble of P."""
    return [module for module in model.modules() if isinstance(module, Tangent)]


def fit(
    backbone: Backbone, train: Sequence[Atoms], *, cover: str | None = None, progress: Progress | None = None
) -> Tangent:
    """The tangent distribution of a potential, from the derivatives of its forces on the training structures.

    Its width is the root mean square force error on these structures; `pmlip.calibrate` fits it to validation data.
    cover: the weights that change, one of COVERS; by default the best choice for this potential. progress(done, total)
    counts structures.
    """
    cover = cover or backbone.tangent_cover
    if cover not in COVERS:
        raise ValueError(f"cover must be one of {', '.join(COVERS)}, got cover={cover!r}{did_you_mean(cover, COVERS)}")
    if not len(train):
        raise ValueError("tangent samples need training structures, got none")
    train = as_structures(train)
    used = subsample(range(len(train)), MOST_STRUCTURES)
    covered, parts = _covered(backbone, train, cover), cover.split("+")
    if not any(covered) and parts != ["shifts"]:
        raise ValueError(f"no weight changes the forces (cover={cover!r}), so there are no tangent samples")
    found = Tangent(0, len(covered))
    found.covered.copy_(torch.tensor(covered))
    found.scales.copy_(torch.tensor([float("shifts" in parts), float(any(covered))]))
    with evaluating(backbone), found.changed(backbone) as groups:
        if len(groups) > 1:
            found.scales.copy_(_balance(backbone, groups, train))
        chosen, sketch = [weight for group in groups for weight in group], found.sketch(groups)
        total = CurvatureSum(DIMENSIONS, centred=False, regularisation=REGULARISATION)
        slopes, missed, square, count = [], [], 0.0, 0
        probes = _probes(len(used))
        for done, index in enumerate(used, start=1):
            atoms = train[index]
            outputs = _outputs(backbone, _graph(backbone, atoms, index))
            with numbered_from(index):
                label = labels([atoms])
            known = label.forces.isfinite().all(1)
            if known.any():
                rows = _force_rows(outputs["forces"][known], chosen, sketch, probes=probes, seed=index)
                if not bool(rows.isfinite().all()):
                    raise StructureError(atoms, index, "the derivatives of its forces are NaN or infinite")
                total.add(rows)
                error = (outputs["forces"].detach().cpu().double() - label.forces)[known]
                square, count = square + float(error.square().sum()), count + error.numel()
            slope = torch.autograd.grad(outputs["energy"].sum(), chosen, materialize_grads=True, allow_unused=True)
            slopes.append(sketch.gather(slope).cpu() / len(atoms))
            missed.append((outputs["energy"].detach().cpu().double() - label.energy) / len(atoms))
            if progress:
                progress(done, len(used))
        if not count:
            raise ValueError("tangent samples need training structures with forces")
        width = math.sqrt(square / count)
        total.add(_energy_rows(torch.stack(slopes), torch.cat(missed), width))
    curvature = total.curvature()
    if not curvature.floor > 0:
        raise ValueError("no weight changes the forces of the training structures, which symmetry fixes")
    found.vectors, found.values = curvature.vectors.float(), curvature.values.float()
    found.floor.fill_(curvature.floor)
    found.energy_slope.copy_(torch.stack(slopes).mean(0))
    found.width.fill_(width)
    return found.to(chosen[0].device)


def passes_of_fit(structures: int) -> int:
    """Passes of `fit`: for each structure, one forward pass and one backward pass per probe; the rest is small."""
    used = min(structures, MOST_STRUCTURES)
    return used * (1 + _probes(used))


def _probes(structures: int) -> int:
    """Number of probes for each structure."""
    return min(MOST_PROBES, max(FEWEST_PROBES, PROBES_IN_ALL // structures))


def _graph(backbone: Backbone, atoms: Atoms, index: int) -> Graph:
    with numbered_from(index):
        return backbone.graph([atoms])


def _outputs(backbone: Backbone, graph: Graph) -> dict[str, Tensor]:
    with torch.enable_grad():
        return backbone(graph)


def _force_rows(forces: Tensor, weights: Sequence[Tensor], sketch: Sketch, *, probes: int, seed: int) -> Tensor:
    """Rows whose sum of g g^T is J^T J of these forces: of each component, or of random combinations if there are many.

    For random signs v, the mean of (J^T v) (J^T v)^T is J^T J.
    """
    count = forces.numel()
    if count <= probes:
        combinations = torch.eye(count)
    else:
        generator = torch.Generator().manual_seed(seed)
        combinations = (2.0 * torch.randint(2, (probes, count), generator=generator) - 1) / math.sqrt(probes)
    along = combinations.view(-1, *forces.shape).to(forces)
    rows = []
    for part in along.split(max(1, ATOMS_IN_A_BACKWARD_PASS // len(forces))):
        found = torch.autograd.grad(forces, weights, part, retain_graph=True, is_grads_batched=True, allow_unused=True)
        # torch would fill in the gradients of weights that forces do not depend on without the batch
        filled = [
            gradient if gradient is not None else weight.new_zeros(len(part), *weight.shape)
            for gradient, weight in zip(found, weights, strict=True)
        ]
        rows += [sketch.gather([gradient[i] for gradient in filled]).cpu() for i in range(len(part))]
    return torch.stack(rows)


def _energy_rows(slopes: Tensor, errors: Tensor, width: float) -> Tensor:
    """Rows of the training energies: derivatives of energies per atom in units of their error relative to the forces'.

    Without what all structures have in common, which no force depends on. Structures without an energy have no row.
    """
    known = errors.isfinite()
    spread = float(errors[known].std()) if int(known.sum()) > 1 else 0.0
    if spread == 0:
        return slopes[:0]
    return (slopes[known] - slopes[known].mean(0)) * (width / spread)


def _covered(backbone: Backbone, train: Sequence[Atoms], cover: str) -> list[bool]:
    """Whether the sketch changes each weight: only weights that change forces, in the layers that `cover` names.

    The others set reference energies or other outputs, or are not used.
    """
    weights = weights_of(backbone)
    if cover == "shifts":
        return [False] * len(weights)
    largest = max(range(len(train)), key=lambda index: len(train[index]))
    moved = train[largest].copy()
    moved.rattle(0.05, seed=0)  # forces that are zero by symmetry respond to nothing
    values = [weight for _, weight in weights]
    with evaluating(backbone), _requiring_gradients(values):
        forces = _outputs(backbone, _graph(backbone, moved, largest))["forces"]
        probe = torch.randn(forces.shape, generator=torch.Generator().manual_seed(0)).to(forces)
        found = torch.autograd.grad(forces, values, probe, materialize_grads=True, allow_unused=True)
    layers: dict[str, list[str]] = {
        "sites": [site.name for site in sites_of(backbone.module, backbone.sites())],
        "readout": backbone.heads(),
    }
    inside = tuple(f"module.{name}." for part in cover.split("+") for name in layers.get(part, []))
    return [
        bool(gradient.any()) and ("all" in cover.split("+") or name.startswith(inside))
        for (name, _), gradient in zip(weights, found, strict=True)
    ]


def _balance(backbone: Backbone, groups: Sequence[Sequence[Tensor]], train: Sequence[Atoms]) -> Tensor:
    """Scales that let each group of weights change the training forces equally, (group,)."""
    squares = torch.zeros(len(groups), dtype=torch.float64)
    for index in subsample(range(len(train)), STRUCTURES_TO_BALANCE):
        forces = _outputs(backbone, _graph(backbone, train[index], index))["forces"]
        signs = 2.0 * torch.randint(2, forces.shape, generator=torch.Generator().manual_seed(index)) - 1
        weights = [weight for group in groups for weight in group]
        found = iter(torch.autograd.grad(forces, weights, signs.to(forces), materialize_grads=True, allow_unused=True))
        for number, group in enumerate(groups):
            squares[number] += sum(float(next(found).double().square().sum()) for _ in group)
    return squares.rsqrt()


@contextlib.contextmanager
def _changed(backbone: Backbone, covered: Sequence[bool], *, shifts: bool) -> Iterator[list[list[Tensor]]]:
    """The groups of weights that a sketch changes: shifts at the sites, which are zero, and the covered parameters."""
    weights = [weight for (_, weight), use in zip(weights_of(backbone), covered, strict=True) if use]
    with contextlib.ExitStack() as stack:
        groups = []
        if shifts:
            sites = sites_of(backbone.module, backbone.sites())
            groups.append(stack.enter_context(shifted(backbone.module, sites)))
        if weights:
            stack.enter_context(_requiring_gradients(weights))
            groups.append(list[Tensor](weights))
        yield groups


@contextlib.contextmanager
def _requiring_gradients(weights: Iterable[Tensor]) -> Iterator[None]:
    """Weights that a package freezes, such as reference energies, may enter the forces too."""
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_()
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
