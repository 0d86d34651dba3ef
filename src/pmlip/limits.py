"""Limits of seeds and of numbers of samples. Does not import torch, so that settings can be checked fast."""

LAST_SEED = 2**32 - 1
LAST_SAMPLE = 2**31 - 1  # larger numbers are reserved for other streams of random numbers
MOST_SAMPLES = 10_000  # per structure; the spread of as many samples is accurate to 1 %


def check_seed(seed: int) -> None:
    if not 0 <= seed <= LAST_SEED:
        raise ValueError(f"a seed must be an integer from 0 to 2^32 - 1, got seed={seed}")


def check_sample_number(number: int, *, name: str = "number") -> None:
    if not 0 <= number <= LAST_SAMPLE:
        raise ValueError(f"samples are numbered from 0 to {LAST_SAMPLE}, got {name}={number}")


def check_samples(samples: int, *, name: str = "samples") -> None:
    """Raise ValueError if more samples are asked for than memory and time can be expected to allow."""
    if samples > MOST_SAMPLES:
        raise ValueError(f"at most {MOST_SAMPLES} samples can be drawn, got {name}={samples}")
