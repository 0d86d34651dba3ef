"""How strongly forces respond to noise: potentials differ by a factor of twenty, and so do the layers of one."""

import copy
import math
from collections.abc import Sequence

import torch
from ase import Atoms

from pmlip.backbones.base import Backbone
from pmlip.methods._sampling import evaluating
from pmlip.noise.injection import noisy_layers
from pmlip.perturbed import Perturbed
from pmlip.structures.atoms import subsample

RELAXED = 0.05  # eV/Å; with smaller forces, structures are at rest
STRUCTURES, PROBES = 4, 8  # of each
SMALLEST_SPREAD = 1e-3  # eV/Å for noise weights of size 1; CHGNet, which responds least, has 0.05
DEAD = 0.02  # of the largest response: some layers, as CHGNet's last of angles, do not reach the forces


def of_layers(potential: Perturbed, structures: Sequence[Atoms]) -> list[float]:
    """The spread of the forces, in eV/Å, for small random noise weights in each layer alone, by their size; 0: dead.

    By gradients, all layers at once: if v is random, |d(v F)/d shift|^2 is on average the sum of squares of dF/d shift.
    """
    tried = copy.deepcopy(potential)
    backbone = tried.backbone
    assert isinstance(backbone, Backbone)
    tried.randomise(0.0)
    weights = [layer.noise_weight for layer in noisy_layers(tried.backbone)]
    w_z, generator = tried.noise.w_z.detach(), torch.Generator().manual_seed(0)
    squares, e = torch.zeros(len(weights), dtype=torch.float64), tried.draw(1)
    some = subsample(structures, STRUCTURES)
    with evaluating(tried), torch.enable_grad():
        for atoms in some:
            graph = backbone.graph([_in_motion(atoms, tried, backbone)])
            forces = tried(graph, e)["forces"]
            for _ in range(PROBES):
                probe = torch.randn(forces.shape, generator=generator).to(forces)
                found = torch.autograd.grad(forces, weights, probe, retain_graph=True, materialize_grads=True)
                squares += torch.stack([x.double().square().sum().cpu() for x in found]) / forces.numel()
    # the shift of a layer is its weights times z, here one z, in a spread all
    per_shift = squares / (len(some) * PROBES) / float((e.to(w_z) @ w_z.T).square().sum())
    spreads = (per_shift * float(w_z.square().sum())).sqrt().tolist()
    if max(spreads) < SMALLEST_SPREAD:
        raise ValueError(
            "the forces do not respond to noise, so no scale of the noise weights can be found; use structures with "
            "non-zero forces, or pass noise_rate=... and start=0"
        )
    return [spread if spread > DEAD * max(spreads) else 0.0 for spread in spreads]


def weights_for(spread: float, responses: Sequence[float], *, balance: float) -> list[float]:
    """Standard deviations of random noise weights of each layer with which forces have this spread, in eV/Å.

    balance: 0 for the same in all layers that respond; 1 for those with which each of them has the same part in the
    spread, so that samples differ in more directions.
    """
    shape = [response**-balance if response else 0.0 for response in responses]
    whole = math.hypot(*(own * response for own, response in zip(shape, responses, strict=True)))
    return [spread * own / whole for own in shape]


@torch.no_grad()
def _in_motion(atoms: Atoms, potential: Perturbed, backbone: Backbone) -> Atoms:
    """The same or, where symmetry fixes its forces so that noise could not move them, one like it without."""
    moved = _with_another_atom(atoms) if len(atoms) == 1 else atoms.copy()
    if float(potential(backbone.graph([moved]))["forces"].abs().max()) < RELAXED:
        moved.rattle(0.05, seed=0)
    return moved


def _with_another_atom(atoms: Atoms) -> Atoms:
    """The same crystal in a cell twice as long: an atom that is alone in its cell feels no force wherever it is."""
    repeats = [1, 1, 1]
    if atoms.pbc.any():
        repeats[int(atoms.pbc.argmax())] = 2
    return atoms.repeat(repeats)
