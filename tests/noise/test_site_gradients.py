import pytest
import torch
from torch import nn

from pmlip.noise.injection import Site, find_sites, inject
from pmlip.noise.site_gradients import collect, sites_of
from pmlip.noise.source import Noise


class Network(nn.Module):
    """Two MLPs on rows, and an energy of all rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(3, 5), nn.SiLU())
        self.second = nn.Sequential(nn.Linear(5, 4), nn.SiLU())
        self.double()

    def forward(self, x):
        return self.second(self.first(x)).square().sum()


ATOM = torch.tensor([0, 1, 0, 2, 2, 0])  # of each row
ROWS = {"node": torch.arange(3), "row": ATOM}
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def envelope(x):
    return x.square().sum(-1, keepdim=True)


def by_shifts(network, *, envelope=None):
    """The same gradients from shifts that are added to the outputs of the layers."""
    shifts = [torch.zeros(3, width, dtype=torch.float64, requires_grad=True) for width in (5, 4)]
    factor = [1.0 if envelope is None else envelope(X), 1.0]
    h = network.first[1](network.first[0](X) + factor[0] * shifts[0][ATOM])
    energy = network.second[1](network.second[0](h) + factor[1] * shifts[1][ATOM]).square().sum()
    return torch.cat(torch.autograd.grad(energy, shifts), 1)


@pytest.mark.parametrize("envelope", [None, envelope])
def test_gradients_are_those_by_shifts(envelope):
    network = Network()
    sites = find_sites(network, [Site("first", envelope=envelope), "second"])
    with collect(network, sites, ROWS) as gradients:
        energy = network(X)
        torch.autograd.grad(energy, gradients.outputs)
    torch.testing.assert_close(gradients.per_atom, by_shifts(network, envelope=envelope))


def test_any_backward_pass_of_the_energy_collects_them():
    """For example the pass that makes the forces."""
    network = Network()
    x = X.clone().requires_grad_()
    with collect(network, find_sites(network, ["first", "second"]), ROWS) as gradients:
        torch.autograd.grad(network(x), x)
    torch.testing.assert_close(gradients.per_atom, by_shifts(network))


def test_the_network_is_the_same_afterwards():
    network = Network()
    before, kinds = network.state_dict(), [type(layer) for layer in network.modules()]
    with pytest.raises(RuntimeError, match="shapes"), collect(network, find_sites(network, ["first"]), ROWS):
        network(X[:, :2])
    assert [type(layer) for layer in network.modules()] == kinds
    assert network.state_dict().keys() == before.keys()
    assert not hasattr(network.first[0], "gradients")


def test_a_noisy_network_has_the_sites_of_its_noise():
    network = Network()
    sites = find_sites(network, ["second"])
    inject(network, Noise(2).double(), sites)
    assert sites_of(network, ["first"]) == sites
    with collect(network, sites, ROWS) as gradients:
        torch.autograd.grad(network(X), gradients.outputs)
    torch.testing.assert_close(gradients.per_atom, by_shifts(Network())[:, 5:])
