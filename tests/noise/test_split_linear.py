import copy
import pickle

import pytest
import torch
from torch.nn import functional

from pmlip.methods.p import perturb
from pmlip.nbody.egnn import EGNN, EGNNConfig
from pmlip.noise.injection import Site, vanish_with_input
from pmlip.noise.split_linear import SplitLinear, linear, split_input


def rows():
    """Ten rows of an edge, its two nodes out of four, and the same put together."""
    generator = torch.Generator().manual_seed(0)
    nodes, edges = (torch.randn(count, 3, generator=generator, dtype=torch.float64) for count in (4, 10))
    first, second = torch.randint(4, (2, 10), generator=generator)
    together = torch.cat([nodes[first], edges, nodes[second]], -1)
    return split_input((nodes, first), (edges, None), (nodes, second)), together


def test_rows_in_parts_give_what_rows_put_together_give():
    parts, together = rows()
    layer = SplitLinear(9, 5).double()
    expected = functional.linear(together, layer.weight, layer.bias)
    torch.testing.assert_close(layer(parts), expected)
    torch.testing.assert_close(layer(together), expected)
    torch.testing.assert_close(
        linear(parts.square(), layer.weight, None), functional.linear(together.square(), layer.weight)
    )


def test_layers_and_rows_can_be_copied():
    parts, _ = rows()
    layer = SplitLinear(9, 5).double()
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(parts), layer(parts))
    assert torch.equal(layer(pickle.loads(pickle.dumps(parts))), layer(parts))


@pytest.mark.parametrize("envelope", [None, vanish_with_input])
def test_an_envelope_sees_rows_put_together(envelope):
    network = EGNN(EGNNConfig(layers=2, width=8))
    model = perturb(network, sites=[Site("layers.0.edge.first", "edge", envelope)], noise_dim=4)
    model.randomise(0.1)
    x, v = torch.randn(2, 6, 5, 3, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    out = model(x, v, torch.ones(6, 5), noise=noise, rows={"edge": None})
    assert bool((out != network(x, v, torch.ones(6, 5))).any())
