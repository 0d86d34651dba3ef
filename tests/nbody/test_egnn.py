import pytest
import torch

import pmlip
from conftest import randomise_noise
from contract import rotation
from pmlip.nbody.egnn import EGNN, EGNNConfig, Pairs, load_published, others
from pmlip_bench.nbody.textbook import TextbookEGNN, complete_pairs

DENSE = {"edge": None, "node": None}


def batch(graphs=6, particles=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, v = (torch.randn(graphs, particles, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, 0.5 * v, (torch.rand(graphs, particles, generator=generator) < 0.5).double() * 2 - 1


def make(**options):
    torch.manual_seed(0)
    net = EGNN(EGNNConfig(**options)).double()
    with torch.no_grad():
        for layer in net.layers:
            layer.position[-1].weight.mul_(300)  # out of the nearly still start, so that a wrong force would show
    return net


@pytest.fixture
def model():
    net = make()
    return randomise_noise(pmlip.perturb(net, sites=net.sites(), noise_dim=32))


def sample(model, x, v, q, e):
    """(sample, graph, particle, 3) for noise (sample, graph, noise)."""
    return model(x[None], v[None], q[None], noise=e, rows=DENSE)


def noise(samples, graphs, seed=1):
    return torch.randn(samples, graphs, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_parameters_are_those_of_the_paper():
    net = EGNN()
    assert sum(p.numel() for p in net.parameters()) == 134_020
    model = pmlip.perturb(net, sites=net.sites(), noise_dim=32)
    assert sum(p.numel() for p in model.parameters()) == 151_428
    assert len(model.sites) == 8


def test_others_are_all_but_oneself():
    values = torch.arange(4.0)[:, None]
    assert others(values)[..., 0].tolist() == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]


@pytest.mark.parametrize("options", [{}, {"node_input": "charge"}, {"distance": "start"}])
def test_graphs_of_any_size_give_what_the_dense_path_gives(options):
    net, (x, v, q) = make(**options), batch()
    flat = net(x.flatten(0, 1), v.flatten(0, 1), q.flatten(), complete_pairs(6, 5))
    torch.testing.assert_close(flat.unflatten(0, (6, 5)), net(x, v, q), rtol=1e-12, atol=1e-12)
    small, large = batch(1, 3, seed=2), batch(1, 6, seed=3)
    parts = [complete_pairs(1, 3), complete_pairs(1, 6)]
    pairs = Pairs(
        torch.cat([parts[0].receiver, parts[1].receiver + 3]), torch.cat([parts[0].sender, parts[1].sender + 3])
    )
    mixed = net(*(torch.cat([a[0], b[0]]) for a, b in zip(small, large, strict=True)), pairs)
    torch.testing.assert_close(mixed[:3], net(*small)[0])
    torch.testing.assert_close(mixed[3:], net(*large)[0])


def test_noise_of_the_dense_path_is_that_of_the_edge_list(model):
    x, v, q = batch()
    pairs, e = complete_pairs(6, 5), noise(3, 6)
    graph = torch.arange(6).repeat_interleave(5)
    rows = {"node": graph, "edge": graph[pairs.receiver]}
    dense = sample(model, x, v, q, e)
    for k in range(3):
        flat = model(x.flatten(0, 1), v.flatten(0, 1), q.flatten(), pairs, noise=e[k], rows=rows)
        torch.testing.assert_close(dense[k], flat.unflatten(0, (6, 5)))


def test_each_sample_is_exactly_equivariant(model):
    x, v, q = batch()
    e = noise(4, 6)
    expected = sample(model, x, v, q, e)
    assert float(expected.detach().std(0).max()) > 1e-3
    shift = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    for sign in (1, -1):
        matrix = sign * torch.from_numpy(rotation())
        moved = sample(model, x @ matrix.T + shift, v @ matrix.T, q, e)
        torch.testing.assert_close(moved, expected @ matrix.T + shift, rtol=1e-10, atol=1e-11)
    order = torch.randperm(5)
    permuted = sample(model, x[:, order], v[:, order], q[:, order], e)
    torch.testing.assert_close(permuted, expected[:, :, order], rtol=1e-10, atol=1e-11)


def test_published_weights_give_published_outputs():
    """The public implementation, written from its formulas with its parameter names."""
    torch.manual_seed(3)
    theirs = TextbookEGNN().double()
    ours = EGNN(EGNNConfig(distance="start")).double()
    load_published(ours, theirs.state_dict())
    x, v, q = batch()
    expected = theirs(x.flatten(0, 1), v.flatten(0, 1), q.flatten(), complete_pairs(6, 5))
    torch.testing.assert_close(ours(x, v, q), expected.unflatten(0, (6, 5)), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"'head.weight' is not a parameter of the public EGNN_vel"):
        load_published(ours, {"head.weight": torch.zeros(1)})


def test_fold_is_the_sample(model):
    x, v, q = batch()
    folded = model.fold(sample=2)
    e = model.draw(3)[2].expand(1, 6, -1)
    torch.testing.assert_close(folded(x, v, q), sample(model, x, v, q, e)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_input": "mass"}, "node_input must be 'speed' or 'charge', got 'mass'"),
        ({"distance": "far"}, "distance must be 'current' or 'start', got 'far'"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EGNN(EGNNConfig(**options))
