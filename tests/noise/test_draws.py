import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pmlip.noise.draws import counterweights, draw, draw_for_training
from pmlip.noise.source import Noise

KINDS = ("plain", "orthogonal", "antithetic")


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1), samples=st.integers(1, 40), more=st.integers(1, 40))
def test_sample_k_does_not_depend_on_how_many_are_drawn(kind, seed, samples, more):
    few = draw(samples, 8, seed=seed, kind=kind)
    many = draw(samples + more, 8, seed=seed, kind=kind)
    assert torch.equal(few, many[:samples])


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1), first=st.integers(0, 30), samples=st.integers(1, 20))
def test_a_sample_does_not_need_those_before_it(kind, seed, first, samples):
    some = draw(samples, 8, seed=seed, kind=kind, first=first)
    assert torch.equal(some, draw(first + samples, 8, seed=seed, kind=kind)[first:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_sample_costs_no_more_than_the_first(kind):
    """All before it would need terabytes."""
    assert draw(1, 128, kind=kind, first=2**31 - 1).shape == (1, 128)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_standard_normal(kind):
    e = torch.cat([draw(20, 8, seed=seed, kind=kind) for seed in range(1000)])
    assert float(e.mean(0).abs().max()) < 0.03
    torch.testing.assert_close(e.T @ e / len(e), torch.eye(8, dtype=e.dtype), rtol=0, atol=0.05)
    assert float((e**4).mean()) == pytest.approx(3, abs=0.1)


def test_seeds_differ_and_repeat():
    assert torch.equal(draw(3, 4, seed=1), draw(3, 4, seed=1))
    assert not torch.equal(draw(3, 4, seed=1), draw(3, 4, seed=2))
    # (seed, k) and (seed + 1, k - 1) must not meet
    assert not torch.isin(draw(3, 4, seed=1), draw(3, 4, seed=2)).any()


def test_orthogonal_draws_are_orthogonal_within_a_block():
    e = draw(8, 8, seed=3, kind="orthogonal")
    gram = e @ e.T
    torch.testing.assert_close(gram, torch.diag(gram.diag()))


def test_orthogonal_draws_steady_the_spread():
    """The standard error of the spread at K = 32 is lower than with plain draws, for a response linear in the noise."""
    response = np.random.default_rng(0).normal(size=(32, 50))
    error = {}
    for kind in ("plain", "orthogonal"):
        variance = np.array(
            [(draw(32, 32, seed=seed, kind=kind).numpy() @ response).var(0, ddof=1).mean() for seed in range(200)]
        )
        error[kind] = variance.std() / variance.mean()
    assert error["orthogonal"] < 0.9 * error["plain"]


def test_antithetic_pairs_cancel_and_bias_the_variance():
    e = draw(6, 4, seed=0, kind="antithetic")
    torch.testing.assert_close(e[::2], -e[1::2])
    variance = np.mean([draw(4, 1, seed=s, kind="antithetic").numpy().var(ddof=1) for s in range(4000)])
    assert variance == pytest.approx(4 / 3, rel=0.05)  # as the docstring warns, too large


def test_training_draws_are_independent_for_every_system_and_sample():
    e = draw_for_training(4, 5, 6, generator=torch.Generator().manual_seed(0))
    assert e.shape == (4, 5, 6)
    assert len(e.unique()) == 4 * 5 * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0, "dim": 4}, "at least 1 sample"),
        ({"samples": 1, "dim": 0}, "noise_dim must be at least 1, got 0"),
        ({"samples": 1, "dim": 4, "seed": -1}, "from 0 to 2\\^32 - 1, got seed=-1"),
        ({"samples": 1, "dim": 4, "seed": 2**32}, "from 0 to 2\\^32 - 1"),
        ({"samples": 1, "dim": 4, "first": -1}, "numbered from 0 to 2147483647, got first=-1"),
        ({"samples": 1, "dim": 4, "first": 2**31}, "numbered from 0 to 2147483647, got first=2147483648"),
        ({"samples": 2, "dim": 4, "first": 2**31 - 1}, "numbered from 0 to 2147483647"),
        ({"samples": 1, "dim": 4, "kind": "sobol"}, "allowed: plain, orthogonal, antithetic"),
    ],
)
def test_bad_draws_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(**arguments)


def test_noise_of_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(4,\) or \(system, 4\), got \(3,\)"):
        Noise(4).set_draw(torch.zeros(3))


def test_several_systems_need_the_index_of_their_rows():
    noise = Noise(4)
    noise.set_draw(torch.zeros(2, 4), {"node": torch.tensor([0, 1])})
    with pytest.raises(ValueError, match=r"each 'edge' row; given: node"):
        noise.shift(torch.zeros(3, 4), "edge")


def test_with_counterweights_a_mean_has_nothing_of_what_is_linear_in_the_draws():
    e = draw(5, 8, seed=1)
    more, weights = counterweights(e)
    slope = torch.arange(8.0, dtype=e.dtype)

    def mean(function):
        return function(e).mean() + (weights.to(e) * function(more)).sum()

    torch.testing.assert_close(mean(lambda e: 3 + e @ slope), torch.tensor(3.0, dtype=e.dtype))
    even = e.square().sum(-1)
    torch.testing.assert_close(mean(lambda e: e.square().sum(-1)), even.mean())  # which says as much as before


def test_with_counterweights_a_mean_is_right_on_average():
    """Of a function with odd and even parts, none of them small."""
    found, plain = [], []
    for seed in range(2000):
        e = draw(4, 3, seed=seed)
        more, weights = counterweights(e)
        x, extra = ((rows.sum(-1) / 3).exp() for rows in (e, more))
        plain.append(float(x.mean()))
        found.append(float(x.mean() + weights.to(extra) @ extra))
    expected = np.exp(3 / 9 / 2)  # the mean of a log-normal law
    assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / np.sqrt(2000))
    assert np.std(found) < 0.6 * np.std(plain)
