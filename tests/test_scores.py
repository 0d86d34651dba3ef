import numpy as np
import pytest
import scoringrules
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pmlip.scores import almost_fair_crps, energy_score, fair_crps, fair_crps_of_scaled, standard_crps
from pmlip_bench.speed import double_sum

# few different values, so that ties among samples and with the target are common
NUMBERS = st.one_of(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.floats(-1e3, 1e3, width=32))


@st.composite
def samples_and_target(draw, least=2):
    count = draw(st.sampled_from([least, 2, 3, 5, 10, 16, 17, 30]))  # compared pair by pair up to 16, then sorted
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=4))
    x = draw(hnp.arrays(np.float64, (count, *shape), elements=NUMBERS))
    y = draw(hnp.arrays(np.float64, shape, elements=NUMBERS))
    return torch.from_numpy(x), torch.from_numpy(np.asarray(y))


@given(samples_and_target())
def test_fair_crps_is_the_double_sum_in_value_and_gradient(data):
    weight = torch.rand(data[1].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for score in (fair_crps, double_sum):
        x, y = (values.clone().requires_grad_() for values in data)
        value = score(x, y)
        (weight * value).sum().backward()
        results.append((value.detach(), x.grad, y.grad))
    for ours, formula in zip(*results, strict=True):
        torch.testing.assert_close(ours, formula, rtol=1e-12, atol=1e-9)


@given(samples_and_target())
def test_agrees_with_scoringrules(data):
    x, y = (values.numpy() for values in data)
    for ours, estimator in ((fair_crps, "pwm"), (standard_crps, "nrg")):
        theirs = scoringrules.crps_ensemble(y, x, m_axis=0, estimator=estimator, backend="numpy")
        np.testing.assert_allclose(ours(*data).numpy(), theirs, rtol=1e-9, atol=1e-9)


@given(samples_and_target(), st.floats(0, 2))
def test_almost_fair_lies_on_the_line_through_both(data, fairness):
    expected = fairness * fair_crps(*data) + (1 - fairness) * standard_crps(*data)
    torch.testing.assert_close(almost_fair_crps(*data, fairness=fairness), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("score", [fair_crps, standard_crps, almost_fair_crps])
def test_one_sample_scores_its_absolute_error(score):
    x, y = torch.randn(1, 7), torch.randn(7)
    torch.testing.assert_close(score(x, y), (x[0] - y).abs())


@pytest.mark.parametrize("count", [2, 3, 10])
def test_the_fair_score_is_unbiased(count):
    """Its mean over draws is the CRPS of the law itself, here in closed form; that of the standard score is not."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 400_000, dtype=torch.float64, generator=generator)
    y = torch.full((400_000,), 0.7, dtype=torch.float64)
    exact = scoringrules.crps_normal(0.7, 0.0, 1.0)
    fair, standard = fair_crps(x, y), standard_crps(x, y)
    error = float(fair.std()) / 400_000**0.5
    assert float(fair.mean()) == pytest.approx(exact, abs=4 * error)
    assert float(standard.mean()) == pytest.approx(exact + 1 / (count * np.pi**0.5), abs=4 * error)


def test_at_the_start_the_spread_term_has_no_gradient():
    """All samples tie: the gradient is that of the mean absolute error, the same for every sample."""
    x = torch.zeros(5, 3, requires_grad=True)
    fair_crps(x, torch.tensor([1.0, -1.0, 0.0])).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[-0.2, 0.2, 0.0]]).expand(5, 3))


@pytest.mark.parametrize("count", [9, 20])
def test_blocks_do_not_show(count, monkeypatch):
    x, y = torch.randn(count, 50, requires_grad=True), torch.randn(50)
    whole = fair_crps(x, y)
    (gradient,) = torch.autograd.grad(whole.sum(), x)
    monkeypatch.setattr("pmlip.scores._BLOCK", 60)
    parts = fair_crps(x, y)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts.sum(), x)[0], gradient)


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_an_offset_does_not_cost_digits(count):
    """Single precision near 1e4 with a spread of 0.05: the score of the very same numbers in double precision."""
    generator = torch.Generator().manual_seed(0)
    x = (1e4 + 0.05 * torch.randn(count, 50, generator=generator)).requires_grad_()
    y = 1e4 + 0.05 * torch.randn(50, generator=generator)
    exact = fair_crps(x.detach().double(), y.double())
    torch.testing.assert_close(fair_crps(x.detach(), y).double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(fair_crps(x, y).double(), exact, rtol=0, atol=1e-6)


def test_half_precision_is_scored_in_single():
    assert fair_crps(torch.randn(3, 4).bfloat16(), torch.randn(4).bfloat16()).dtype == torch.float32


@given(samples_and_target(least=1))
def test_the_l1_energy_score_is_the_sum_of_the_component_scores(data):
    x, y = (values.unsqueeze(-1) if values.dim() == k else values for k, values in zip((1, 0), data, strict=True))
    torch.testing.assert_close(energy_score(x, y, norm=1) / y.shape[-1], fair_crps(x, y).mean(-1), rtol=1e-9, atol=1e-7)


def test_the_energy_score_agrees_with_scoringrules_and_ignores_the_frame():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(*shape, 3, dtype=torch.float64, generator=generator) for shape in ((8, 20), (20,)))
    theirs = scoringrules.es_ensemble(y.numpy(), x.numpy(), m_axis=0, estimator="fair", backend="numpy")
    np.testing.assert_allclose(energy_score(x, y).numpy(), theirs, rtol=1e-10)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=generator))
    torch.testing.assert_close(energy_score(x @ rotation, y @ rotation), energy_score(x, y))


def test_the_energy_score_has_a_finite_gradient_at_ties():
    x = torch.zeros(3, 2, 3, requires_grad=True)
    energy_score(x, torch.zeros(2, 3)).sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize(
    ("samples", "target", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(5), r"\(3, 4\) must be \(sample, ...\) with the target's shape \(5,\)"),
        (torch.zeros(0, 4), torch.zeros(4), "at least one sample"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(samples, target, message):
    for score in (fair_crps, energy_score):
        with pytest.raises(ValueError, match=message):
            score(samples, target)


def test_the_energy_score_of_scalars_is_refused():
    with pytest.raises(ValueError, match="the energy score needs vectors"):
        energy_score(torch.randn(5), torch.tensor(0.0))


def test_negative_fairness_is_refused():
    with pytest.raises(ValueError, match=r"must not be negative \(0: standard, 1: fair\), got -0.5"):
        almost_fair_crps(torch.zeros(2, 1), torch.zeros(1), fairness=-0.5)


@pytest.mark.parametrize("count", [8, 32])
@pytest.mark.parametrize("factor", [0.6, 1.0, 1.8, 6.0])
def test_the_score_of_scaled_samples_is_that_of_samples_with_that_spread(factor, count):
    """Scaled about the mean of K samples, samples of a wide law would score too well, of a narrow one too badly."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(count, 200_000, generator=generator, dtype=torch.float64)
    target = torch.randn(200_000, generator=generator, dtype=torch.float64)
    expected = fair_crps(draws, target).mean()
    found = fair_crps_of_scaled(draws / factor, target, factor).mean()
    assert float(found) == pytest.approx(float(expected), rel=5e-3)
    about_known = fair_crps_of_scaled(draws / factor, target, factor, mean=torch.zeros(200_000)).mean()
    assert float(about_known) == pytest.approx(float(expected), rel=5e-3)
