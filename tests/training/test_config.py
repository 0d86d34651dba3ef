import pytest

from pmlip.training.config import FinetuneConfig


@pytest.mark.parametrize(
    ("given", "structures", "steps"),
    [
        ({}, 32, 600),
        ({}, 34, 603),  # whole passes of 9 steps
        ({}, 1000, 2500),  # ten passes
        ({"steps": 7}, 34, 7),
        ({"epochs": 2}, 34, 18),
        ({"epochs": 2, "batch": 8}, 34, 10),
    ],
)
def test_steps_for_a_training_set(given, structures, steps):
    assert FinetuneConfig(**given).steps_for(structures) == steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 7, "epochs": 4}, "give steps or epochs, not both, got steps=7 and epochs=4"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"fairness": -0.5}, "fairness must not be negative, got -0.5"),
        ({"seed": -1}, r"a seed must be an integer from 0 to 2\^32 - 1, got seed=-1"),
        ({"seed": 2**32}, r"a seed must be an integer from 0 to 2\^32 - 1, got seed=4294967296"),
        ({"samples": 10**9}, "at most 10000 samples can be drawn, got samples=1000000000"),
        ({"validation_samples": 10**9}, "at most 10000 samples can be drawn, got validation_samples=1000000000"),
        ({"noise_rate": 0.0}, "noise_rate must be positive, got 0.0"),
        ({"average": 1.0}, r"average must lie in \[0, 1\), got 1.0"),
        ({"energy_without_noise": -1}, "energy_without_noise must not be negative, got -1"),
        ({"second_moment": -0.1}, r"second_moment must lie in \[0, 1\), got -0.1"),
        ({"common_energy": 2}, "common_energy must lie between 0 and 1, got 2"),
        ({"warm_up": 20}, "warm_up must lie between 0 and 1, got 20"),
        ({"fairness": float("nan")}, "fairness must not be negative, got nan"),
        ({"energy": -1.0}, "the weight of energy must not be negative"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        FinetuneConfig(**change)
