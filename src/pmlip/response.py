"""How strongly forces respond to noise: potentials differ by a factor of twenty, and so do the layers of one."""

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ase import Atoms

from pmlip.chunks import FIXED_ATOMS
from pmlip.injection import noisy_layers
from pmlip.samples import STILL
from pmlip.structures import evenly

if TYPE_CHECKING:
    from pmlip.model import Potential

RELAXED = 0.05  # eV/Å; with smaller forces, structures are at rest
STRUCTURES, SAMPLES = 4, 4  # for each layer
SMALL = 0.01  # noise weights to which forces respond in proportion
DEAD = 1e-3  # of the largest response: some layers, as CHGNet's last of angles, do not reach the output


def of_layers(potential: "Potential", structures: Sequence[Atoms]) -> list[float]:
    """The spread of the forces, in eV/Å, for random noise weights of size 1 in each layer alone; 0 for a dead one."""
    tried = copy.deepcopy(potential)
    some = [_with_another_atom(atoms) if len(atoms) == 1 else atoms.copy() for atoms in evenly(structures, STRUCTURES)]
    tried.randomise(0.0)
    for atoms in some:
        if float(tried.predict(atoms).forces.abs().max()) < RELAXED:
            atoms.rattle(0.05, seed=0)  # where symmetry fixes the forces there would be no spread at all
    layers = len(list(noisy_layers(tried.backbone)))
    found = []
    for layer in range(layers):
        tried.randomise([SMALL * (layer == other) for other in range(layers)])
        drawn = tried.sample(some, samples=SAMPLES, chunk_atoms=FIXED_ATOMS)
        found.append(float(drawn.forces.double().std(0).square().mean().sqrt()))
    if max(found) < STILL:
        raise ValueError(
            "forces do not respond to noise, so no noise weights can be found that suit them; give structures with "
            "forces, or the rate and the start with --noise-rate and --start 0"
        )
    return [spread / SMALL if spread > DEAD * max(found) else 0.0 for spread in found]


def weights_for(spread: float, responses: Sequence[float], *, balance: float) -> list[float]:
    """Standard deviations of random noise weights of each layer with which forces have this spread, in eV/Å.

    balance: 0 for the same in all layers that respond; 1 for those with which each of them has the same part in the
    spread, so that samples differ in more directions.
    """
    shape = [response**-balance if response else 0.0 for response in responses]
    whole = math.hypot(*(own * response for own, response in zip(shape, responses, strict=True)))
    return [spread * own / whole for own in shape]


def _with_another_atom(atoms: Atoms) -> Atoms:
    """The same crystal in a cell twice as long: an atom that is alone in its cell feels no force wherever it is."""
    repeats = [1, 1, 1]
    if atoms.pbc.any():
        repeats[int(atoms.pbc.argmax())] = 2
    return atoms.repeat(repeats)
