"""How strongly the forces of a potential respond to noise; potentials differ by a factor of twenty."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ase import Atoms

from pmlip.chunks import FIXED_ATOMS
from pmlip.samples import STILL
from pmlip.structures import evenly

if TYPE_CHECKING:
    from pmlip.model import Potential

RELAXED = 0.05  # eV/Å; with smaller forces, structures are at rest


def weights_for(potential: "Potential", spread: float, structures: Sequence[Atoms]) -> float:
    """The standard deviation of random noise weights with which forces have this spread, in eV/Å."""
    tried, std = copy.deepcopy(potential), 0.01
    tried.randomise(std)
    some = [_with_another_atom(atoms) if len(atoms) == 1 else atoms.copy() for atoms in evenly(structures, 8)]
    for atoms in some:
        if float(tried.predict(atoms).forces.abs().max()) < RELAXED:
            atoms.rattle(0.05, seed=0)  # where symmetry fixes the forces there would be no spread at all
    drawn = tried.sample(some, samples=8, chunk_atoms=FIXED_ATOMS)
    found = float(drawn.spread.forces.double().square().mean().sqrt())
    if found < STILL:
        raise ValueError(
            "forces do not respond to noise, so no noise weights can be found that suit them; give structures with "
            "forces, or the rate and the start with --noise-rate and --start 0"
        )
    return std * spread / found


def _with_another_atom(atoms: Atoms) -> Atoms:
    """The same crystal in a cell twice as long: an atom that is alone in its cell feels no force wherever it is."""
    repeats = [1, 1, 1]
    if atoms.pbc.any():
        repeats[int(atoms.pbc.argmax())] = 2
    return atoms.repeat(repeats)
