import pytest

from pmlip.limits import LAST_SAMPLE, LAST_SEED, MOST_SAMPLES, check_sample_number, check_samples, check_seed


def test_limits_are_allowed():
    check_seed(0)
    check_seed(LAST_SEED)
    check_sample_number(LAST_SAMPLE)
    check_samples(MOST_SAMPLES)


def test_beyond_them_the_argument_is_named():
    for seed in (-1, LAST_SEED + 1, 10**30):
        with pytest.raises(ValueError, match=rf"from 0 to 2\^32 - 1, got seed={seed}"):
            check_seed(seed)
    with pytest.raises(ValueError, match=r"at most 10000 samples can be drawn, got samples=10001"):
        check_samples(MOST_SAMPLES + 1)
    with pytest.raises(ValueError, match=r"numbered from 0 to 2147483647, got sample=-1"):
        check_sample_number(-1, name="sample")
