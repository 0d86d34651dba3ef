import math

import netcal.metrics.regression
import numpy as np
import pytest
import torch
import uncertainty_toolbox
from scipy import stats

from pmlip import metrics


def calibrated(samples, entries=200_000, seed=0):
    """Samples and target from one law whose mean and width change from entry to entry."""
    random = np.random.default_rng(seed)
    mean, width = random.normal(size=entries), random.uniform(0.5, 2, entries)
    draws = mean + width * random.normal(size=(samples + 1, entries))
    return draws[:-1], draws[-1]


def summary(samples, target):
    return samples.mean(0), samples.std(0, ddof=1), target, len(samples)


@pytest.mark.parametrize("count", [2, 5, 10, 50])
class TestACalibratedModelScoresAsCalibratedAtEveryK:
    def test_spread_skill_ratio(self, count):
        assert metrics.spread_skill_ratio(*summary(*calibrated(count))) == pytest.approx(1, abs=0.01)

    def test_z_mean_square(self, count):
        assert metrics.z_mean_square(*summary(*calibrated(count))) == pytest.approx(1, abs=0.015)

    def test_coverage(self, count):
        for level in (0.5, 0.9, 0.99):
            assert metrics.coverage(*summary(*calibrated(count)), level=level) == pytest.approx(level, abs=0.004)

    def test_rank_histogram(self, count):
        histogram = metrics.rank_histogram(*calibrated(count))
        np.testing.assert_allclose(histogram * (count + 1), 1, atol=0.1)

    def test_pit_and_miscalibration_area(self, count):
        pit = metrics.pit(*calibrated(count))
        assert stats.kstest(pit[:5000], "uniform").pvalue > 1e-3
        assert metrics.miscalibration_area(pit) < 0.005

    def test_over_confidence_is_seen(self, count):
        samples, target = calibrated(count)
        narrow = samples.mean(0) + 0.5 * (samples - samples.mean(0))
        assert metrics.spread_skill_ratio(*summary(narrow, target)) == pytest.approx(0.5, abs=0.01)
        assert metrics.z_mean_square(*summary(narrow, target)) > 1.2
        assert metrics.coverage(*summary(narrow, target)) < 0.93


def test_mixing_conventions_would_show():
    """ddof = 0 with the factor for ddof = 1 gives 0.948 at K = 10, which we must not."""
    samples, target = calibrated(10)
    wrong = metrics.spread_skill_ratio(samples.mean(0), samples.std(0), target, 10)
    assert wrong == pytest.approx(0.948, abs=0.01)


def test_ties_are_ranked_at_random():
    ranks = metrics.ranks(np.zeros((4, 50_000)), np.zeros(50_000))
    np.testing.assert_allclose(np.bincount(ranks) / 50_000, 0.2, atol=0.01)


class TestAgainstOtherImplementations:
    """With an exact width (K = infinity) our definitions are theirs."""

    @pytest.fixture
    def gaussian(self):
        random = np.random.default_rng(1)
        mean, width = random.normal(size=4000), random.uniform(0.5, 2, 4000)
        return mean, width, mean + 1.3 * width * random.normal(size=4000)

    def test_negative_log_likelihood(self, gaussian):
        mean, width, target = gaussian
        theirs = uncertainty_toolbox.nll_gaussian(mean, width, target)
        assert metrics.negative_log_likelihood(*gaussian, math.inf) == pytest.approx(theirs)

    def test_negative_log_likelihood_at_finite_k_is_students_t(self, gaussian):
        mean, width, target = gaussian
        sigma = width * math.sqrt(1 + 1 / 8)
        expected = -stats.t.logpdf(target, 7, loc=mean, scale=sigma).mean()
        assert metrics.negative_log_likelihood(mean, width, target, 8) == pytest.approx(expected)

    def test_miscalibration_area(self, gaussian):
        mean, width, target = gaussian
        theirs = uncertainty_toolbox.miscalibration_area(mean, width, target, num_bins=1001)
        pit = stats.norm.cdf((target - mean) / width)
        assert metrics.miscalibration_area(pit) == pytest.approx(theirs, abs=2e-3)

    def test_reliability(self, gaussian):
        mean, width, target = gaussian
        levels, theirs = uncertainty_toolbox.get_proportion_lists_vectorized(mean, width, target, num_bins=21)
        pit = stats.norm.cdf((target - mean) / width)
        np.testing.assert_allclose(metrics.reliability(pit, levels), theirs, atol=1e-9)

    def test_ence(self, gaussian):
        mean, width, target = gaussian
        # netcal's bins have equal width, ours equal count: with one bin they are the same
        theirs = netcal.metrics.regression.ENCE(bins=1).measure((mean, width), target)
        assert metrics.ence(mean, width, target, math.inf, bins=1) == pytest.approx(float(np.squeeze(theirs)), rel=1e-6)

    def test_spearman(self, gaussian):
        mean, width, _ = gaussian
        mixed = np.round(mean + width, 1)
        assert metrics.spearman(mixed, width) == pytest.approx(stats.spearmanr(mixed, width).statistic)

    def test_auroc(self, gaussian):
        mean, width, _ = gaussian
        chance = stats.mannwhitneyu(width + 0.3, mean).statistic / len(mean) ** 2
        assert metrics.auroc(mean, width + 0.3) == pytest.approx(chance)


def test_ence_of_a_calibrated_model_lies_within_its_null():
    samples, target = calibrated(20, entries=4000)
    value = metrics.ence(*summary(samples[1:], target), bins=10)
    null = metrics.ence_null(samples, bins=10)
    assert abs(value - null.mean()) < 4 * null.std()
    narrow = samples.mean(0) + 0.5 * (samples - samples.mean(0))
    assert metrics.ence(*summary(narrow, target), bins=10) > 3 * null.max()


def test_ence_grows_with_the_number_of_bins():
    samples, _ = calibrated(50, entries=2000)
    assert metrics.ence_null(samples, bins=100).mean() > 1.5 * metrics.ence_null(samples, bins=10).mean()


def test_partial_spearman_takes_away_what_a_third_quantity_explains():
    random = np.random.default_rng(0)
    force = random.normal(size=20_000)
    error, spread = force + random.normal(size=20_000), force + random.normal(size=20_000)
    assert metrics.spearman(error, spread) == pytest.approx(0.48, abs=0.02)
    assert metrics.partial_spearman(error, spread, force) == pytest.approx(0, abs=0.03)


def test_samples_on_a_line_have_one_direction_and_independent_ones_as_many_as_there_are_components():
    random = np.random.default_rng(0)
    system = np.array([0, 0, 1, 1])  # two atoms each
    line = random.normal(size=(500, 1, 1)) * random.normal(size=(4, 3))
    assert metrics.effective_directions(line, system) == pytest.approx(1)
    independent = random.normal(size=(5000, 4, 3))
    assert metrics.effective_directions(independent, system) == pytest.approx(6, rel=0.01)
    still = np.where(system[:, None] == 1, 7.0, independent)  # symmetry fixes all atoms of the second system
    assert metrics.effective_directions(still, system) == pytest.approx(6, rel=0.01)
    assert math.isnan(metrics.effective_directions(np.ones((5, 4, 3)), system))


def test_auroc_of_equal_and_of_separate_sets():
    assert metrics.auroc([1, 2, 3], [1, 2, 3]) == 0.5
    assert metrics.auroc([1, 2], [3, 4]) == 1


def test_sparsification_of_a_perfect_and_of_a_useless_spread():
    error = np.random.default_rng(0).normal(size=5000)
    by_spread, by_error = metrics.sparsification(error, np.abs(error))
    np.testing.assert_allclose(by_spread, by_error)
    assert by_spread[0] == pytest.approx(1)
    assert bool((np.diff(by_spread) <= 0).all())
    assert metrics.ause(error, np.abs(error)) == 0
    constant = [metrics.ause(e, np.ones(5000)) for e in (error, np.sort(error**2), -np.sort(-(error**2)))]
    assert constant[1] == pytest.approx(constant[2])  # the order of the rows says nothing
    useless = np.random.default_rng(1).normal(size=5000)
    assert metrics.ause(error, useless) > 0.4


def test_bootstrap_resamples_whole_structures():
    """Entries that repeat one value per structure: the interval must be that of the structures, not of the entries."""
    random = np.random.default_rng(0)
    per_structure = random.normal(size=100)
    system = np.repeat(np.arange(100), 50)
    interval = metrics.bootstrap(lambda x: float(x.mean()), per_structure[system], system=system, resamples=500)
    assert interval.value == pytest.approx(per_structure.mean())
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * per_structure.std() / 10, rel=0.15)


def test_bootstrap_of_several_arrays_and_torch():
    samples, target = calibrated(10, entries=300)
    mean, spread, _, count = summary(samples, target)
    arrays = [torch.from_numpy(array) for array in (mean, spread, target)]
    interval = metrics.bootstrap(
        lambda m, s, y: metrics.spread_skill_ratio(m, s, y, count), *arrays, system=torch.arange(300) // 3
    )
    assert interval.low < interval.value < interval.high


def test_a_constant_has_no_rank_correlation():
    assert math.isnan(metrics.spearman([1.0, 2.0], [3.0, 3.0]))
    assert math.isnan(metrics.partial_spearman([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [1.0, 1.0, 1.0]))
    # resamples of one structure alone do not count
    interval = metrics.bootstrap(metrics.spearman, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], system=[0, 1, 2])
    assert interval == (1, 1, 1)
    assert math.isnan(metrics.bootstrap(metrics.spearman, [1.0, 1.0], [1.0, 2.0], system=[0, 1]).low)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.spread_skill_ratio([1.0], [1.0], [1.0], 1), "at least 2 samples, got samples=1"),
        (lambda: metrics.spread_skill_ratio([1.0], [1.0], [1.0, 2.0], 5), r"shapes differ: mean \(1,\)"),
        (lambda: metrics.spread_skill_ratio([1.0], [1.0], [math.nan], 5), "NaN or infinite"),
        (lambda: metrics.spread_skill_ratio([1.0], [-1.0], [2.0], 5), "must not be negative"),
        (lambda: metrics.z_scores([1.0, 1.0], [0.0, 1.0], [2.0, 2.0], 5), "1 of 2 entries have a spread of zero"),
        (lambda: metrics.coverage([1.0], [1.0], [2.0], 5, level=95), "between 0 and 1, got level=95"),
        (lambda: metrics.ence([1.0], [1.0], [2.0], 5, bins=10), "1 entries cannot be split into bins=10"),
        (lambda: metrics.ence_null(np.zeros((2, 3))), "at least 3 samples, got samples=2"),
        (lambda: metrics.ranks(np.zeros((2, 3)), np.zeros(4)), r"samples \(2, 3\) must be"),
        (lambda: metrics.spearman([], []), "empty"),
        (lambda: metrics.spread_skill_ratio([1.0], [1.0], [1.0], 5), "all errors are zero"),
        (lambda: metrics.ence([1.0, 2.0], [0.0, 1.0], [2.0, 1.0], 5, bins=1), "1 of 2 entries have a spread of zero"),
        (lambda: metrics.auroc([1.0], [math.inf]), "NaN or infinite"),
        (lambda: metrics.bootstrap(np.mean, [1.0, 2.0], system=[0]), "2 entries, but system has 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
