import math

import pytest
import torch
from ase import Atoms

import pmlip
from molecules import molecules
from pmlip.methods._response import of_layers, weights_for
from pmlip.noise.injection import noisy_layers
from tiny import tiny_backbone


def spread_of(model, data, sizes):
    """Of the forces, for random noise weights of these sizes."""
    model.randomise(sizes, seed=1)
    return float(model.sample(data, samples=64).forces.std(0).square().mean().sqrt())


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_weights_of_those_sizes_give_that_spread_and_nothing_is_changed(balance):
    data, model = molecules(), pmlip.perturb(tiny_backbone())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = weights_for(0.01, of_layers(model, data), balance=balance)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert spread_of(model, data, sizes) == pytest.approx(0.01, rel=0.4)


def test_in_balance_every_layer_that_reaches_the_forces_has_the_same_part_in_the_spread():
    """The last update of the test's own backbone reaches the energy alone."""
    data, model = molecules(), pmlip.perturb(tiny_backbone())
    names = [layer.noise_site.name for layer in noisy_layers(model.backbone)]
    responses = of_layers(model, data)
    assert [name for name, response in zip(names, responses, strict=True) if response == 0] == ["update.1.1"]
    sizes = weights_for(0.01, responses, balance=1.0)
    for chosen, response in enumerate(responses):
        alone = spread_of(model, data, [size * (chosen == layer) for layer, size in enumerate(sizes)])
        assert alone == pytest.approx(0.01 / math.sqrt(3) if response else 0.0, rel=0.4)
    assert len(set(weights_for(0.01, responses, balance=0.0)) - {0.0}) == 1


def test_structures_that_feel_no_force_tell_nothing():
    apart = [Atoms("SiO", [[0, 0, 0], [0, 0, 50.0]])]
    with pytest.raises(ValueError, match="forces do not respond to noise"):
        of_layers(pmlip.perturb(tiny_backbone()), apart)
