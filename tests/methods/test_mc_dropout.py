import copy

import pytest
import torch
from torch import nn

from pmlip.methods.mc_dropout import add_dropout

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 2))
    return net, add_dropout(net, ["2"], share=0.25)


def test_outside_it_is_the_plain_network():
    net, dropout = network()
    plain = net(X)
    with dropout.drawing(torch.Generator().manual_seed(0)):
        assert not torch.allclose(net(X), plain)
    assert torch.equal(net(X), plain)


def test_a_seed_repeats_its_choice_and_the_mean_is_the_plain_output():
    net, dropout = network()
    many = X[:1].expand(40_000, -1)
    outputs = []
    with torch.no_grad():
        for _ in range(2):
            with dropout.drawing(torch.Generator().manual_seed(1)):
                outputs.append(net(many))
        assert torch.equal(*outputs)
        torch.testing.assert_close(outputs[0].mean(0), net(X[:1])[0], rtol=0, atol=0.01)


def test_the_share_of_units_is_left_out():
    _, dropout = network()
    with dropout.drawing(torch.Generator().manual_seed(2)):
        thinned = dropout.thin(torch.ones(100_000))
    assert float((thinned == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert thinned.unique().tolist() == pytest.approx([0, 4 / 3])


def test_copies_are_independent():
    net, dropout = network()
    twin, _ = copy.deepcopy((net, dropout))
    with dropout.drawing(torch.Generator()):
        assert torch.equal(twin(X), network()[0](X))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="between 0 and 1"):
        add_dropout(nn.Linear(2, 2), [""], share=share)
