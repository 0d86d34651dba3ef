import numpy as np
import pytest

import pmlip
from conftest import randomise_noise
from molecules import WATER
from pmlip import methods
from tiny import tiny_backbone


@pytest.fixture
def model():
    return randomise_noise(pmlip.perturb(tiny_backbone()))


def test_a_linear_property_has_the_spread_of_the_samples(model):
    far = WATER.copy()
    far.positions[1:] *= 1.2

    def difference(calculator):
        return calculator.get_potential_energy(far) - calculator.get_potential_energy(WATER.copy())

    found = pmlip.propagate(difference, model, samples=6, seed=2)
    drawn = model.sample([WATER, far], samples=6, seed=2).energy
    np.testing.assert_allclose(found.values, drawn[:, 1] - drawn[:, 0], atol=1e-9)
    np.testing.assert_allclose(found.spread, (drawn[:, 1] - drawn[:, 0]).std(), atol=1e-9)
    # sample by sample: the spread of a difference is not that of two independent energies
    assert found.spread < 0.9 * (drawn[:, 1].std() ** 2 + drawn[:, 0].std() ** 2) ** 0.5
    assert str(found) == f"{found.mean:.4g} ± {found.spread:.2g}"


def test_arrays_and_progress(model):
    seen = []
    found = pmlip.propagate(
        lambda calculator: calculator.get_forces(WATER.copy()),
        model,
        samples=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.mean.shape == found.spread.shape == (3, 3)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_what_cannot_be_propagated_is_refused(model):
    with pytest.raises(ValueError, match="a spread needs at least 2 samples"):
        pmlip.propagate(lambda calculator: 0.0, model, samples=1)
    with pytest.raises(ValueError, match="was never trained"):
        pmlip.propagate(lambda calculator: 0.0, pmlip.perturb(tiny_backbone()))
    with pytest.raises(ValueError, match="samples of mc-dropout cannot be exported"):
        pmlip.propagate(lambda calculator: 0.0, methods.make("mc-dropout", tiny_backbone()))
    lengths = iter([1, 2])
    with pytest.raises(ValueError, match=r"gave shape \(2,\) for sample 1 and \(1,\) for sample 0"):
        pmlip.propagate(lambda calculator: np.zeros(next(lengths)), model, samples=2)
