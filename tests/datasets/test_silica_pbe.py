"""How the silica set was made: the structures it starts from, and what is said of its convergence."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "datasets" / "silica_pbe"


@pytest.fixture(scope="module")
def make():
    return runpy.run_path(str(FOLDER / "make.py"))


@pytest.mark.parametrize(
    ("name", "atoms", "neighbours"),
    [("quartz", 9, 4), ("cristobalite", 12, 4), ("stishovite", 6, 6), ("coesite", 24, 4)],
)
def test_silicon_has_its_oxygens_around_it(make, name, atoms, neighbours):
    structure = make["polymorph"](name)
    assert len(structure) == atoms
    near = structure.repeat((3, 3, 3))
    distances = near.get_all_distances(mic=True)
    silicon, oxygen = (np.flatnonzero(near.symbols == symbol) for symbol in ("Si", "O"))
    assert len(oxygen) == 2 * len(silicon)
    bonds = distances[np.ix_(silicon, oxygen)] < 2.0
    assert (bonds.sum(1) == neighbours).all()
    assert distances[np.ix_(silicon, oxygen)].min() > 1.55


def test_the_readme_tells_the_convergence_as_measured():
    text = (FOLDER / "README.md").read_text()
    used = {"quartz": [2, 2, 2], "cristobalite": [2, 2, 2], "stishovite": [3, 3, 4]}
    for row in json.loads((FOLDER / "convergence.json").read_text()):
        if row["cutoff"] == 50:
            what = f"50 Ry | {row['against']['cutoff']:.0f} Ry"
        elif row["kpoints"] == used[row["polymorph"]]:
            what = " | ".join(" x ".join(map(str, grid)) for grid in (row["kpoints"], row["against"]["kpoints"]))
        else:
            continue
        numbers = (
            f"{row['force_meV_per_A']:.1f} | {row['stress_kbar']:.1f} | {row['energy_difference_meV_per_atom']:.2f}"
        )
        assert f"| {row['polymorph']} | {what} | {numbers} |" in text
