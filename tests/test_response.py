import pytest
import torch
from ase import Atoms

import pmlip
from pmlip.response import weights_for
from test_training import molecules
from tiny import tiny_backbone


def test_weights_of_that_size_give_that_spread_and_nothing_is_changed():
    data, model = molecules(), pmlip.perturb(tiny_backbone())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    std = weights_for(model, 0.01, data)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.randomise(std, seed=1)
    spread = model.sample(data, samples=64).spread.forces.square().mean().sqrt()
    assert float(spread) == pytest.approx(0.01, rel=0.4)


def test_structures_that_feel_no_force_tell_nothing():
    apart = [Atoms("SiO", [[0, 0, 0], [0, 0, 50.0]])]
    with pytest.raises(ValueError, match="forces do not respond to noise"):
        weights_for(pmlip.perturb(tiny_backbone()), 0.01, apart)
