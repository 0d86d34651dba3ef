"""Tangent samples: linear changes of a potential along the directions that the training forces leave open.

The weights w of the potential become w + S x, where the sketch S adds each entry of x to many weights. With J the
derivative of an output with respect to x at x = 0, and H the sum of J^T J over the training forces, sample k gains

    width J u_k,    u_k ~ N(0, (H + floor I)^-1)

Directions that change the training forces are narrow, all others are wide. So this part of the spread is small on
structures like the training set and rises elsewhere. J u is a central difference of two passes, which makes each sample
a weighted sum of two potentials: with r = width / (2 step),

    (1/2 + r) f(w + step S u) + (1/2 - r) f(w - step S u)

A finite change by `width u` would not do: the open directions are so wide that the response is far from linear.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator
from ase.calculators.mixing import LinearCombinationCalculator
from torch import Tensor, nn

from pmlip.backbones.base import Backbone, Graph, evaluating
from pmlip.curvature import Curvature, CurvatureSum
from pmlip.structures.atoms import Progress, subsample
from pmlip.structures.labels import labels

DIMENSIONS = 2048  # of x
PROBES = 24  # random combinations of the forces of a structure whose derivatives are summed; 16 to 32 are enough
REGULARISATION = 1e-4  # floor, as a multiple of the mean eigenvalue of H
STRUCTURES_FOR_STEP = 4
LINEAR = 0.003  # largest deviation of a central difference from the one with half the step, relative to its size
LARGEST_STEP, SMALLEST_STEP = 1.0, 1e-4


class Tangent(nn.Module):
    """The distribution of the changes x of one potential. Sample k is identified by a draw, (dim,) normal numbers."""

    vectors: Tensor  # (rank, dim), largest eigenvectors of H
    values: Tensor  # (rank,) eigenvalues of H + floor I; all other directions have the eigenvalue `floor`
    floor: Tensor
    energy_slope: Tensor  # (dim,) eV per atom: derivative of the mean energy per atom of the training structures
    covered: Tensor  # (parameter,) whether the sketch changes this parameter of the backbone
    width: Tensor  # of the samples; 0: no tangent part
    step: Tensor  # of the central difference

    def __init__(self, rank: int, covered: int, *, dim: int = DIMENSIONS) -> None:
        super().__init__()
        sizes = {"vectors": (rank, dim), "values": (rank,), "floor": (), "energy_slope": (dim,)}
        for name, size in (sizes | {"width": (), "step": ()}).items():
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64 if not size else torch.float32))
        self.register_buffer("covered", torch.zeros(covered, dtype=torch.bool))

    @property
    def dim(self) -> int:
        return self.vectors.shape[1]

    @property
    def active(self) -> bool:
        return bool(self.width > 0)

    def direction(self, draw: Tensor) -> Tensor:
        """u = (H + floor I)^-1/2 draw for a draw (dim,), in double precision."""
        draw, vectors = draw.to(self.vectors.device, torch.float64), self.vectors.double()
        scale = self.values.double().rsqrt() - self.floor.rsqrt()
        return (scale * (vectors @ draw)) @ vectors + self.floor.rsqrt() * draw

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the two potentials of a sample, with the weights w + step S u and w - step S u."""
        ratio = float(self.width / (2 * self.step))
        return 0.5 + ratio, 0.5 - ratio

    def energy_shift(self, direction: Tensor) -> float:
        """Energy per atom that the change step S u adds to the training structures on average."""
        return float(self.step * (self.energy_slope.double() @ direction))

    @contextlib.contextmanager
    def moved(self, backbone: Backbone, direction: Tensor) -> Iterator[None]:
        """Inside the block, the weights of the backbone are w + step S u."""
        weights = self._weights(backbone)
        before = [weight.data for weight in weights]
        try:
            for weight, change in zip(weights, Sketch(weights, self.dim).spread(self.step * direction), strict=True):
                weight.data = weight.data + change
            yield
        finally:
            for weight, value in zip(weights, before, strict=True):
                weight.data = value

    def _weights(self, backbone: Backbone) -> list[nn.Parameter]:
        return [weight for weight, use in zip(weights_of(backbone), self.covered.tolist(), strict=True) if use]

    @classmethod
    def stored(cls, state: dict[str, Any], prefix: str) -> "Tangent | None":
        """An empty Tangent with the sizes of a state dict, which holds its tensors under this prefix; None: it holds none."""
        if f"{prefix}vectors" not in state:
            return None
        rank, dim = state[f"{prefix}vectors"].shape
        return cls(rank, len(state[f"{prefix}covered"]), dim=dim)


@dataclass(frozen=True)
class Pair:
    """One sample as two ordinary potentials, whose outputs are added with these weights."""

    potentials: tuple[Backbone, Backbone]
    weights: tuple[float, float]

    def calculator(self) -> Calculator:
        """An ASE calculator of the sample."""
        return LinearCombinationCalculator([potential.calculator() for potential in self.potentials], self.weights)


class Sketch:
    """S: adds each entry of x to many weights, with random signs that never change."""

    def __init__(self, weights: Sequence[Tensor], dim: int) -> None:
        self._like, self._dim = list(weights), dim
        random = np.random.default_rng(0)
        device = self._like[0].device
        count = sum(weight.numel() for weight in weights)
        self._entry = torch.from_numpy(random.integers(dim, size=count)).to(device)
        self._sign = torch.from_numpy(random.integers(2, size=count, dtype=np.int8) * 2 - 1).to(device)

    def gather(self, gradients: Sequence[Tensor]) -> Tensor:
        """S^T g: the derivative with respect to x, (dim,), from the derivatives with respect to the weights."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).double()
        return flat.new_zeros(self._dim).index_add_(0, self._entry, flat * self._sign)

    def spread(self, x: Tensor) -> list[Tensor]:
        """S x: the change of each weight."""
        flat = x.index_select(0, self._entry) * self._sign
        parts = flat.split([weight.numel() for weight in self._like])
        return [part.view(weight.shape).to(weight) for part, weight in zip(parts, self._like, strict=True)]


def weights_of(backbone: Backbone) -> list[nn.Parameter]:
    """All parameters of the potential itself, without the parameters of its noise."""
    return [weight for name, weight in backbone.named_parameters() if not name.endswith("noise_weight")]


def tangents_of(model: nn.Module) -> list[Tangent]:
    return [module for module in model.modules() if isinstance(module, Tangent)]


def fit(backbone: Backbone, train: Sequence[Atoms], *, progress: Progress | None = None) -> Tangent:
    """The tangent distribution of a potential, from the derivatives of its forces on the training structures.

    Its width is the root mean square force error on these structures; `pmlip.calibrate` fits it to validation data.
    progress(done, total) counts structures.
    """
    if not len(train):
        raise ValueError("the tangent of a potential needs training structures, got none")
    weights = weights_of(backbone)
    with evaluating(backbone), _requiring_gradients(weights):
        covered = _that_change_forces(backbone, weights, train[0])
        if not any(covered):
            raise ValueError("no weight of this potential changes its forces, so it has no tangent")
        chosen = [weight for weight, use in zip(weights, covered, strict=True) if use]
        sketch = Sketch(chosen, DIMENSIONS)
        total = CurvatureSum(DIMENSIONS, centred=False, regularisation=REGULARISATION)
        slope, square, count = torch.zeros(DIMENSIONS, dtype=torch.float64), 0.0, 0
        for done, atoms in enumerate(train, start=1):
            outputs = _outputs(backbone, backbone.graph([atoms]))
            rows = _force_rows(outputs["forces"], chosen, sketch, seed=done)
            total.add(rows)
            energy = torch.autograd.grad(outputs["energy"].sum(), chosen, materialize_grads=True, allow_unused=True)
            slope += sketch.gather(energy).cpu() / (len(atoms) * len(train))
            error = outputs["forces"].detach().cpu().double() - labels([atoms]).forces
            error = error[error.isfinite()]
            square, count = square + float(error.square().sum()), count + error.numel()
            if progress:
                progress(done, len(train))
    found = _as_module(total.curvature(), covered)
    found.energy_slope.copy_(slope)
    found.width.fill_(math.sqrt(square / count) if count else 1.0)
    found.to(weights[0].device)
    found.step.fill_(_step(backbone, found, subsample(train, STRUCTURES_FOR_STEP)))
    return found


def _as_module(curvature: Curvature, covered: Sequence[bool]) -> Tangent:
    found = Tangent(len(curvature.values), len(covered))
    found.vectors.copy_(curvature.vectors)
    found.values.copy_(curvature.values)
    found.floor.fill_(curvature.floor)
    found.covered.copy_(torch.tensor(covered))
    return found


def _outputs(backbone: Backbone, graph: Graph) -> dict[str, Tensor]:
    with torch.enable_grad():
        return backbone(graph)


def _force_rows(forces: Tensor, weights: Sequence[Tensor], sketch: Sketch, *, seed: int) -> Tensor:
    """Rows whose sum of g g^T is J^T J of these forces: of each component, or of random combinations if there are many.

    For random signs v, the mean of (J^T v) (J^T v)^T is J^T J.
    """
    count = forces.numel()
    if count <= PROBES:
        probes = torch.eye(count)
    else:
        generator = torch.Generator().manual_seed(seed)
        probes = (2.0 * torch.randint(2, (PROBES, count), generator=generator) - 1) / math.sqrt(PROBES)
    rows = []
    for probe in probes:
        found = torch.autograd.grad(
            forces, weights, probe.view(forces.shape).to(forces), retain_graph=True, materialize_grads=True
        )
        rows.append(sketch.gather(found).cpu())
    return torch.stack(rows)


def _that_change_forces(backbone: Backbone, weights: Sequence[Tensor], atoms: Atoms) -> list[bool]:
    """Whether each weight changes forces. The others set reference energies or other outputs, or are not used."""
    moved = atoms.copy()
    moved.rattle(0.05, seed=0)  # forces that are zero by symmetry respond to nothing
    forces = _outputs(backbone, backbone.graph([moved]))["forces"]
    probe = torch.randn(forces.shape, generator=torch.Generator().manual_seed(0)).to(forces)
    found = torch.autograd.grad(forces, weights, probe, materialize_grads=True, allow_unused=True)
    return [bool(gradient.any()) for gradient in found]


@contextlib.contextmanager
def _requiring_gradients(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Weights that a package freezes, such as reference energies, may enter the forces too."""
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_()
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


@torch.no_grad()
def _step(backbone: Backbone, tangent: Tangent, structures: Sequence[Atoms]) -> float:
    """The largest step whose central difference agrees with the one of half the step: larger ones round off less."""
    graph = backbone.graph(structures)
    draw = torch.randn(tangent.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction = tangent.direction(draw)
    with evaluating(backbone):
        step, found = LARGEST_STEP, _derivative(backbone, tangent, graph, direction, LARGEST_STEP)
        while step > SMALLEST_STEP:
            finer = _derivative(backbone, tangent, graph, direction, step / 2)
            if bool((found - finer).norm() <= LINEAR * finer.norm()):
                break
            step, found = step / 2, finer
    return step


def _derivative(backbone: Backbone, tangent: Tangent, graph: Graph, direction: Tensor, step: float) -> Tensor:
    """J u of the forces."""
    tangent.step.fill_(step)
    sides = []
    for sign in (1, -1):
        with tangent.moved(backbone, sign * direction):
            sides.append(backbone(graph)["forces"].double())
    return (sides[0] - sides[1]) / (2 * step)
