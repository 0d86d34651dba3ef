import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.neighborlist import neighbor_list
from hypothesis import given
from hypothesis import strategies as st

from pmlip.structures.atoms import CLOSEST, StructureError, as_structures


def salt(scale=1.0):
    atoms = bulk("NaCl", "rocksalt", a=5.6)
    atoms.set_cell(scale * atoms.cell, scale_atoms=True)
    return atoms


def water(scale=1.0, **options):
    return Atoms("OH2", scale * np.array([[0, 0, 0], [0, 0.76, 0.59], [0, -0.76, 0.59]]), **options)


def changed(atoms, name, value):
    getattr(atoms, name)[-1] = value
    return atoms


@pytest.mark.parametrize(
    ("atoms", "problem"),
    [
        (changed(salt(), "numbers", 0), "2 atoms.: atom 1 has the atomic number 0; allowed: 1 to 118"),
        (changed(salt(), "numbers", 119), "atom 1 has the atomic number 119; allowed: 1 to 118"),
        (changed(salt(), "numbers", -1), "atom 1 has the atomic number -1"),
        (changed(salt(), "positions", np.nan), "is NaN or infinite"),
        (changed(salt(), "positions", 1e9), "a position or a cell vector is 1e.09 Å long; allowed: up to 100000 Å"),
        (salt(1e-3), "its cell is only 0.00323 Å thick; allowed: 0.5 Å or more"),
        (salt(0.2), "it has 5.69 atoms per Å.3; allowed: up to 2"),
        (salt(1e9), "allowed: up to 100000 Å"),
        (water(cell=[1e9] * 3), "allowed: up to 100000 Å"),
        (changed(salt(), "cell", salt().cell[1]), "its cell vectors lie in one plane or on one line"),
        (changed(salt(), "cell", salt().cell[0] + salt().cell[1] + [0, 0, 1e-6]), "in one plane or on one line"),
        (water(cell=[[3, 0, 0], [3, 0, 0], [0, 0, 0]]), "in one plane or on one line"),
        (changed(salt(), "positions", salt().positions[0]), "atoms 0 and 1 are 0 Å apart; remove one of them"),
        (changed(salt(), "positions", salt().positions[0] + 2 * salt().cell[0]), "atoms 0 and 1 are .* Å apart"),
        (water(1e-5), "Å apart; remove one of them"),
    ],
)
def test_structures_that_mean_nothing_are_refused(atoms, problem):
    with pytest.raises(StructureError, match=rf"structure 1 .*{problem}") as found:
        as_structures([water(), atoms])
    assert "\n" not in str(found.value)


def test_unusual_structures_are_allowed():
    """A large vacuum, a thin molecular cell, a rhombohedral cell with sharp angles, a slab and a single atom."""
    sharp = Atoms("Bi2", [[0, 0, 0], [0, 0, 5]], cell=[[2.6, 0, 13], [-1.3, 2.25, 13], [-1.3, -2.25, 13]], pbc=True)
    slab = Atoms("C2", [[0, 0, 0], [1.4, 0, 0]], cell=[[2.46, 0, 0], [-1.23, 2.13, 0], [0, 0, 0]], pbc=[1, 1, 0])
    wire = Atoms("Au", cell=[[0, 0, 2.5], [0, 0, 0], [0, 0, 0]], pbc=[1, 0, 0])
    allowed = [water(cell=[1e4] * 3, pbc=True), sharp, slab, wire, Atoms("Si"), bulk("C") * (3, 3, 3)]
    assert as_structures(allowed) == allowed


@given(
    seed=st.integers(0, 2**32 - 1),
    apart=st.sampled_from([0.0, 0.5 * CLOSEST, 2 * CLOSEST, None]),
    pbc=st.tuples(*[st.booleans()] * 3),
)
def test_close_atoms_are_those_that_ase_finds(seed, apart, pbc):
    random = np.random.default_rng(seed)
    size = random.integers(2, 10)
    atoms = Atoms(f"H{size}", 6 * random.normal(size=(size, 3)), cell=8 * np.eye(3) + random.normal(size=(3, 3)))
    atoms.pbc = pbc
    if apart is not None:
        direction = random.normal(size=3)
        images = random.integers(-2, 3, size=3) * np.array(pbc)
        atoms.positions[-1] = atoms.positions[0] + apart * direction / np.linalg.norm(direction)
        atoms.positions[-1] += images @ atoms.cell.array
    if len(neighbor_list("d", atoms, CLOSEST)):
        with pytest.raises(StructureError, match="Å apart"):
            as_structures(atoms)
    else:
        assert as_structures(atoms)
