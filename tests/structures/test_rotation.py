import numpy as np
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator

from molecules import molecules
from pmlip.structures.labels import fingerprint
from pmlip.structures.rotation import random_rotation, rotated
from tiny import tiny_backbone


def test_rotations_turn_structures_and_labels_alike():
    random = np.random.default_rng(0)
    matrix = random_rotation(random)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(matrix) == pytest.approx(1)
    atoms = molecules(1)[0]
    results = {**atoms.calc.results, "stress": random.normal(size=6)}
    atoms.set_cell(5 * np.eye(3) + 0.1 * random.normal(size=(3, 3)))
    atoms.calc = SinglePointCalculator(atoms, **results)
    backbone = tiny_backbone()
    turned = rotated(atoms, matrix)
    outputs = [backbone(backbone.graph([a])) for a in (atoms, turned)]
    torch.testing.assert_close(outputs[1]["forces"], outputs[0]["forces"] @ torch.from_numpy(matrix).T)
    np.testing.assert_allclose(turned.calc.results["forces"], atoms.calc.results["forces"] @ matrix.T)
    # a stress turned there and back is itself, and its trace never changes
    back = rotated(turned, matrix.T)
    np.testing.assert_allclose(back.calc.results["stress"], atoms.calc.results["stress"], atol=1e-12)
    assert turned.calc.results["stress"][:3].sum() == pytest.approx(atoms.calc.results["stress"][:3].sum())
    assert turned.get_volume() == pytest.approx(atoms.get_volume())
    assert fingerprint([turned]) != fingerprint([atoms])
