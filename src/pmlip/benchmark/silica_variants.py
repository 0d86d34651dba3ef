"""Methods of the silica benchmark fine-tuned otherwise, by "method+variant": what it compares, and what was tried."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    config: Mapping[str, Any] = field(default_factory=dict)  # what it changes in the settings of the fine-tuning
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method


COMPARED = {
    "p+random-start": Variant({"start": 1.0}),
    # its schedule counts steps but is advanced once per epoch, so its rates rise until the end
    "blip+published": Variant(
        {
            "backbone_rate": 1e-5,
            "noise_rate": 1e-4,
            "batch": 8,
            "steps": None,
            "epochs": 50,
            "clip": 0.5,
            "warm_up": 1.0,
        }
    ),
}

# The tuning of CHGNet: for each method the same number of trials, those of all and its own.
TRIALS_OF_ALL = {
    "as-is": Variant(),
    "backbone-1e-3": Variant({"backbone_rate": 1e-3}),
    "backbone-6e-3": Variant({"backbone_rate": 6e-3}),
    "short-warm-up": Variant({"warm_up": 0.05}),
}
FIXED = 1e-9  # a rate at which noise weights stay what they are: the backbone learns to live with the noise
TRIALS: dict[str, dict[str, Variant]] = {
    "p": {
        "noise-half": Variant({"noise_rate": 2.8e-3}),  # of what is found by itself for CHGNet
        "start-1": Variant({"start": 1.0}),
        "start-3": Variant({"start": 3.0}),
        "start-1-fixed": Variant({"start": 1.0, "noise_rate": FIXED}),
        "128-dimensions": Variant({}, {"noise_dim": 128}),
        "start-1-128-dimensions": Variant({"start": 1.0}, {"noise_dim": 128}),
        "start-0.5-128-dimensions": Variant({"start": 0.5}, {"noise_dim": 128}),
        "start-1-fixed-128-dimensions": Variant({"start": 1.0, "noise_rate": FIXED}, {"noise_dim": 128}),
    },
    "blip": {
        "noise-1e-2": Variant({"noise_rate": 1e-2}),
        "noise-5e-2": Variant({"noise_rate": 5e-2}),
        "offset-4": Variant({"noise_rate": 1e-2}, {"offset": 4.0}),
        "offset-4-beta-1e-2": Variant({"noise_rate": 1e-2}, {"offset": 4.0, "beta": 1e-2}),
        "offset-4-beta-1e-4": Variant({"noise_rate": 1e-2}, {"offset": 4.0, "beta": 1e-4}),
        "offset-4-wide": Variant({"noise_rate": 1e-2}, {"offset": 4.0, "prior": 0.1, "largest": 0.5}),
        "offset-2-wide": Variant({"noise_rate": 1e-2}, {"offset": 2.0, "prior": 0.1, "largest": 0.5}),
        "offset-6-wide": Variant({"noise_rate": 1e-2}, {"offset": 6.0, "prior": 0.1, "largest": 0.5}),
    },
    "mc-dropout": {
        "share-0.005": Variant({}, {"share": 0.005}),
        "share-0.01": Variant({}, {"share": 0.01}),
        "share-0.02": Variant({}, {"share": 0.02}),
        "share-0.1": Variant({}, {"share": 0.1}),
        "share-0.01-backbone-1e-3": Variant({"backbone_rate": 1e-3}, {"share": 0.01}),
        "share-0.02-backbone-1e-3": Variant({"backbone_rate": 1e-3}, {"share": 0.02}),
        "share-0.01-backbone-6e-3": Variant({"backbone_rate": 6e-3}, {"share": 0.01}),
        "share-0.02-backbone-6e-3": Variant({"backbone_rate": 6e-3}, {"share": 0.02}),
    },
    "deterministic": {
        "backbone-2e-3": Variant({"backbone_rate": 2e-3}),
        "backbone-4e-3": Variant({"backbone_rate": 4e-3}),
        "average-0.95": Variant({"average": 0.95}),
        "backbone-5e-3": Variant({"backbone_rate": 5e-3}),
        "long-warm-up-backbone-4e-3": Variant({"warm_up": 0.4, "backbone_rate": 4e-3}),
        "clip-1": Variant({"clip": 1.0}),
        "energy-0.2": Variant({"energy": 0.2}),
        "long-warm-up": Variant({"warm_up": 0.4}),
    },
}


def trials(methods: list[str]) -> list[str]:
    """The names of all trials of these methods."""
    for method in methods:
        if method not in TRIALS:
            raise ValueError(f"unknown method {method!r}; tuned are: {', '.join(TRIALS)}")
    return [f"{method}+{name}" for method in methods for name in TRIALS_OF_ALL | TRIALS[method]]


VARIANTS = COMPARED | {
    f"{method}+{name}": variant for method, own in TRIALS.items() for name, variant in (TRIALS_OF_ALL | own).items()
}
