"""Structures are converted once for training, on a tiny potential in double precision."""

import numpy as np
import pytest
import torch

from molecules import molecules
from pmlip.structures.atoms import StructureError
from pmlip.structures.labels import labels
from pmlip.training.batches import LabelledStructures
from tiny import tiny_backbone


@pytest.fixture
def counted(monkeypatch):
    """A backbone, and the indices of the structures whose graphs it has built."""
    backbone, built = tiny_backbone(), []
    single = backbone.single
    monkeypatch.setattr(backbone, "single", lambda atoms, index: built.append(index) or single(atoms, index))
    return backbone, built


def assert_same_labels(given, expected):
    assert torch.equal(given.system, expected.system)
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, equal_nan=True)


@pytest.mark.parametrize("indices", [[0], [3, 1, 4], [1, 1]])
def test_a_batch_is_the_graph_and_the_labels_of_its_structures(indices):
    data, backbone = molecules(5), tiny_backbone()
    chosen = [data[index] for index in indices]
    batch = LabelledStructures(data).batch(backbone, indices)
    expected = backbone.graph(chosen)
    assert torch.equal(batch.graph.rows["edge"], expected.rows["edge"])
    with torch.no_grad():
        torch.testing.assert_close(backbone(batch.graph), backbone(expected))
    assert_same_labels(batch.labels, labels(chosen))


def test_each_graph_is_built_once(counted):
    backbone, built = counted
    structures = LabelledStructures(molecules(4))
    structures.build_graphs(backbone)
    for _ in range(3):
        structures.batch(backbone, [2, 0, 3])
    assert built == [0, 1, 2, 3]


def test_graphs_beyond_the_memory_are_built_again(counted):
    backbone, built = counted
    structures = LabelledStructures(molecules(3), memory=0)
    for _ in range(2):
        structures.batch(backbone, [1, 2])
    assert built == [1, 2, 1, 2]


def test_labels_rotate_with_their_structures():
    data = molecules(3)
    quarter = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    rotated = LabelledStructures(data).rotated([2, 0], [quarter, np.eye(3)])
    np.testing.assert_allclose(rotated.structures[0].positions, data[2].positions @ quarter.T)
    expected = labels([data[2], data[0]])
    first = expected.system == 0
    torch.testing.assert_close(rotated.labels.forces[first], expected.forces[first] @ torch.from_numpy(quarter).T)
    torch.testing.assert_close(rotated.labels.forces[~first], expected.forces[~first])


def test_a_structure_that_the_potential_cannot_take_is_named_by_its_index(monkeypatch):
    data, backbone = molecules(3), tiny_backbone()

    def refuse(atoms, index):
        raise StructureError(atoms, index, "not today")

    monkeypatch.setattr(backbone, "single", refuse)
    with pytest.raises(StructureError, match=r"structure 0 .*not today"):
        LabelledStructures(data).build_graphs(backbone)
