"""How strongly forces respond to noise.

The response differs by a factor of twenty between potentials, and as much between the layers of one potential.
"""

import copy
import math
from collections.abc import Sequence

import torch
from ase import Atoms

from pmlip.backbones.base import Backbone, evaluating
from pmlip.noise.injection import noisy_layers
from pmlip.perturbed import Perturbed
from pmlip.structures.atoms import subsample

RELAXED = 0.05  # eV/Å; a structure with smaller forces counts as relaxed
STRUCTURES, PROBES = 4, 8  # structures to probe, and random vectors for each
SMALLEST_SPREAD = 1e-3  # eV/Å for noise weights of standard deviation 1; CHGNet, with the weakest response, has 0.05
DEAD = 0.02  # fraction of the largest response; some layers (CHGNet's last angle layer) hardly affect the forces


def of_layers(potential: Perturbed, structures: Sequence[Atoms]) -> list[float]:
    """Force spread per layer, in eV/Å per unit standard deviation of the layer's random noise weights; 0: no response.

    Valid for small weights in one layer alone. Computed from gradients, for all layers at once: for a random vector v,
    the mean of |d(v F)/d shift|^2 is the sum of the squares of dF/d shift.
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
            graph = backbone.graph([_with_free_forces(atoms, tried, backbone)])
            forces = tried(graph, e)["forces"]
            for _ in range(PROBES):
                probe = torch.randn(forces.shape, generator=generator).to(forces)
                found = torch.autograd.grad(forces, weights, probe, retain_graph=True, materialize_grads=True)
                squares += torch.stack([x.double().square().sum().cpu() for x in found]) / forces.numel()
    # a layer's shift is its noise weights times z: divide by |z|^2 of this draw, multiply by its mean over all draws
    per_shift = squares / (len(some) * PROBES) / float((e.to(w_z) @ w_z.T).square().sum())
    spreads = (per_shift * float(w_z.square().sum())).sqrt().tolist()
    if max(spreads) < SMALLEST_SPREAD:
        raise ValueError(
            "the forces do not respond to noise, so the noise weights cannot be scaled to them; use structures with "
            "non-zero forces, or pass noise_rate=... and start=0"
        )
    return [spread if spread > DEAD * max(spreads) else 0.0 for spread in spreads]


def weights_for(spread: float, responses: Sequence[float], *, balance: float) -> list[float]:
    """Standard deviation of the random noise weights of each layer that gives this force spread, in eV/Å.

    balance: 0 gives all layers that respond equal weights; 1 gives them equal contributions to the spread, so that
    samples differ in more directions.
    """
    shape = [response**-balance if response else 0.0 for response in responses]
    whole = math.hypot(*(own * response for own, response in zip(shape, responses, strict=True)))
    return [spread * own / whole for own in shape]


@torch.no_grad()
def _with_free_forces(atoms: Atoms, potential: Perturbed, backbone: Backbone) -> Atoms:
    """A copy whose forces respond to noise: rattled if its forces are near zero, which symmetry may enforce."""
    copied = _doubled(atoms) if len(atoms) == 1 else atoms.copy()
    if float(potential(backbone.graph([copied]))["forces"].abs().max()) < RELAXED:
        copied.rattle(0.05, seed=0)
    return copied


def _doubled(atoms: Atoms) -> Atoms:
    """The same crystal in a cell twice as long; symmetry makes the force on a single atom in a cell zero."""
    repeats = [1, 1, 1]
    if atoms.pbc.any():
        repeats[int(atoms.pbc.argmax())] = 2
    return atoms.repeat(repeats)
