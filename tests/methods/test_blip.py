import copy
import pickle

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from pmlip.methods.blip import make_variational, weight_divergence

X = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return net, make_variational(net, {"row": ["0", "2"]}, {"row": 5}).double()


@pytest.mark.parametrize(("alpha", "prior"), [(0.1, 1.0), (1.0, 1.0), (3.0, 0.25)])
def test_the_divergence_is_the_integral_it_stands_for(alpha, prior):
    weight = 0.7
    posterior = stats.norm(weight, np.sqrt(alpha) * weight)
    reference = stats.norm(0, np.sqrt(prior) * weight)
    low, high = posterior.ppf([1e-12, 1 - 1e-12])
    integral, _ = integrate.quad(lambda w: posterior.pdf(w) * (posterior.logpdf(w) - reference.logpdf(w)), low, high)
    assert float(weight_divergence(torch.tensor(alpha, dtype=torch.float64), prior)) == pytest.approx(
        integral, rel=1e-6
    )


def test_the_divergence_of_a_network_averages_rows_and_layers_and_adds_kinds():
    _, posterior = network()
    alpha = {"node": torch.tensor([[0.1, 0.2]]), "edge": torch.tensor([[0.3], [0.4]])}
    expected = weight_divergence(alpha["node"], 1.0).mean() + weight_divergence(alpha["edge"], 1.0).mean()
    torch.testing.assert_close(posterior.divergence(alpha), expected)
    # a batch may lack one kind: molecules of two atoms have no angles
    without = {**alpha, "edge": alpha["edge"][:0]}
    torch.testing.assert_close(posterior.divergence(without), weight_divergence(alpha["node"], 1.0).mean())


def test_outputs_are_those_of_random_weights():
    """Mean and variance over draws of the layer's outputs against those over draws of its weights N(W, alpha W^2)."""
    net, posterior = network()
    alpha = {"row": torch.full((20_000, 2), 0.3, dtype=torch.float64)}
    with posterior.drawing(alpha, torch.Generator().manual_seed(1)), torch.no_grad():
        drawn = net[0](X[:1].expand(20_000, -1))
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(20_000, 4, 5, dtype=torch.float64, generator=generator)
    weights = net[0].weight.detach() * (1 + 0.3**0.5 * noise)
    expected = weights @ X[0] + net[0].bias.detach()
    torch.testing.assert_close(drawn.mean(0), expected.mean(0), rtol=0, atol=0.03)
    torch.testing.assert_close(drawn.std(0), expected.std(0), rtol=0.03, atol=0)


def test_without_noise_it_is_the_plain_network():
    net, posterior = network()
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain.load_state_dict(net.state_dict())
    assert torch.equal(net(X), plain(X))
    with posterior.drawing(posterior.infer({"row": X}), torch.Generator()):
        assert not torch.allclose(net(X), plain(X))
    assert torch.equal(net(X), plain(X))


def test_alpha_lies_between_nothing_and_its_largest():
    _, posterior = network()
    alpha = posterior.infer({"row": 1e3 * torch.randn(500, 5, dtype=torch.float64)})["row"]
    assert float(alpha.detach().max()) <= 0.8 / 0.2 + 1e-9
    assert float(alpha.detach().min()) > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_are_independent_and_the_same(copied):
    pair = network()
    twin = copied(pair)
    alpha = {"row": torch.ones(3, 2, dtype=torch.float64)}
    outputs = []
    for net, posterior in (pair, twin):
        with posterior.drawing(alpha, torch.Generator().manual_seed(0)):
            outputs.append(net(X))
    assert torch.equal(*outputs)


def test_only_linear_layers_can_be_variational():
    with pytest.raises(ValueError, match="'1' is a Tanh"):
        make_variational(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), {"row": ["1"]}, {"row": 2})
