"""Graphs and label tensors of structures, made once and cached."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ase import Atoms

from pmlip.backbones.base import Backbone, Graph
from pmlip.samples import Outputs, tensors
from pmlip.structures.labels import join, labels, split
from pmlip.structures.rotation import rotated

GRAPH_MEMORY = 2 * 2**30  # bytes of cached graphs; the graphs of further structures are rebuilt for each batch


@dataclass(frozen=True)
class LabelledBatch:
    """The graph of a batch of structures, and their labels."""

    graph: Graph
    labels: Outputs


class LabelledStructures:
    """Structures with cached labels and graphs; `memory` limits the size of the graphs in bytes."""

    def __init__(self, structures: Sequence[Atoms], *, memory: int = GRAPH_MEMORY) -> None:
        self.structures = list(structures)
        self.labels = labels(structures)
        self._single_labels = split(self.labels)
        self._graphs: dict[int, Graph] = {}
        self._memory_left = memory

    def __len__(self) -> int:
        return len(self.structures)

    def build_graphs(self, backbone: Backbone) -> None:
        """Build every graph now, so that a structure the backbone does not support fails before training."""
        for index in range(len(self)):
            self._graph(backbone, index)

    def labels_of(self, indices: Sequence[int]) -> Outputs:
        return join([self._single_labels[index] for index in indices])

    def batch(self, backbone: Backbone, indices: Sequence[int]) -> LabelledBatch:
        graph = backbone.join([self._graph(backbone, index) for index in indices])
        return LabelledBatch(graph, self.labels_of(indices))

    def rotated(self, indices: Sequence[int], matrices: Sequence[np.ndarray]) -> "LabelledStructures":
        """The structures at `indices`, each rotated together with its labels."""
        pairs = zip(indices, matrices, strict=True)
        return LabelledStructures([rotated(self.structures[index], matrix) for index, matrix in pairs])

    def _graph(self, backbone: Backbone, index: int) -> Graph:
        if index in self._graphs:
            return self._graphs[index]
        graph = backbone.single(self.structures[index], index)
        size = sum(tensor.nbytes for tensor in tensors((graph.batch, graph.rows)))
        if size <= self._memory_left:
            self._graphs[index] = graph
            self._memory_left -= size
        return graph
