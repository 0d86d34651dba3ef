import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from pmlip.training.config import FinetuneConfig
from pmlip.training.optimiser import Optimiser

CONFIG = FinetuneConfig(steps=10, warm_up=0.2, average=0.5, clip=1e9)


def made(config=CONFIG):
    model = nn.ParameterList([torch.zeros(3), torch.zeros(2)])
    fast, slow = model
    return Optimiser(model, [([fast], 0.1), ([slow], 0.01), ([], 1.0)], config, steps=10), fast, slow


def take(optimisation, number, gradient=1.0):
    for parameter in optimisation.parameters:
        parameter.grad = torch.full_like(parameter, gradient)
    return optimisation.step(number)


@pytest.mark.parametrize("last", [0.0, 0.3])
def test_rates_rise_and_fall_as_a_cosine_to_the_last_rate(last):
    optimisation, _, _ = made(replace(CONFIG, last_rate=last))
    rates = []
    for number in range(10):
        take(optimisation, number)
        rates.append([group["lr"] for group in optimisation.optimizer.param_groups])
    fast = [rate for rate, _ in rates]
    assert fast[:3] == pytest.approx([0.05, 0.1, 0.1])
    assert fast[6] == pytest.approx(0.1 * (1 + last) / 2)  # half-way down
    assert fast[9] == pytest.approx(0.1 * (last + (1 - last) * 0.5 * (1 + math.cos(math.pi * 7 / 8))))
    assert [slow for _, slow in rates] == pytest.approx([rate / 10 for rate in fast])


def test_the_average_of_the_weights_forgets_the_initial_ones():
    optimisation, fast, _ = made()
    expected = fast.detach().clone()
    for number in range(10):
        take(optimisation, number)
        share = max(0.5, 1 - (number + 1) / (number + 10))
        expected = expected.lerp(fast.detach(), share)
    torch.testing.assert_close(optimisation.averaged[0].detach(), expected)
    assert not torch.equal(fast.detach(), expected)


def test_it_goes_on_from_its_state():
    whole, begun = made(), made()
    for number in range(6):
        take(whole[0], number, gradient=number - 2.0)
        if number < 3:
            take(begun[0], number, gradient=number - 2.0)
    resumed = made()
    resumed[0].model.load_state_dict(begun[0].model.state_dict())
    resumed[0].restore(begun[0].state())
    for number in range(3, 6):
        take(resumed[0], number, gradient=number - 2.0)
    for a, b in zip([*whole[1:], *whole[0].averaged], [*resumed[1:], *resumed[0].averaged], strict=True):
        assert torch.equal(a, b)


def test_gradients_are_clipped_and_those_that_are_no_numbers_move_nothing():
    optimisation, fast, _ = made(replace(CONFIG, clip=0.5))
    assert take(optimisation, 0, gradient=3.0) == pytest.approx(3 * math.sqrt(5))
    assert torch.cat([p.grad for p in optimisation.parameters]).norm() == pytest.approx(0.5, rel=1e-4)
    before = fast.detach().clone()
    with pytest.raises(FloatingPointError, match="the gradient of step 2 is NaN or infinite; lower the learning rates"):
        take(optimisation, 1, gradient=float("nan"))
    assert torch.equal(fast.detach(), before)


def test_there_must_be_something_to_train():
    with pytest.raises(ValueError, match="nothing to train: the backbone is frozen"):
        Optimiser(nn.Linear(1, 1), [([], 0.1)], CONFIG, steps=1)
