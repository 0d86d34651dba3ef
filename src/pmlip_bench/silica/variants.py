"""Variants of methods in the silica benchmark, named "method+variant": compared variants and tuning trials."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pmlip import methods
from pmlip.calibration import calibrate
from pmlip.methods import Method
from pmlip.methods._tangents import add_tangents
from pmlip.methods.base import FIXED_ATOMS
from pmlip.tangent import COVERS
from pmlip.training.config import FinetuneConfig
from pmlip_bench.silica.data import Splits


@dataclass(frozen=True)
class Variant:
    config: Mapping[str, Any] = field(default_factory=dict)  # changed fine-tuning settings
    options: Mapping[str, Any] = field(default_factory=dict)  # changed options of the method
    # a variant that is not trained, but made by a function from the fine-tuned model of another variant
    of: str | None = None
    make: Callable[[Method, Splits], Method] | None = None

    def made(self, model: Method, data: Splits) -> Method:
        assert self.make is not None
        return self.make(model, data)


def _with_tangents(model: Method, data: Splits, *, cover: str | None = None) -> Method:
    add_tangents(model, data.train, cover=cover)
    calibrate(model, data.valid, energies=False, chunk_atoms=FIXED_ATOMS)
    return model


def _with_widths_from_novelty(model: Method, data: Splits) -> Method:
    return methods.build("novelty", [model], train=data.train, valid=data.valid)


# settings of single methods in the benchmark, found by the trials below
TUNED = {
    "p": Variant({"tangent": True}, of="p+no-tangent", make=_with_tangents),
    "blip": Variant({"second_moment": 0.999}),
    "mc-dropout": Variant({"last_rate": 0.0}),
}

# the paper's loss
AS_IN_THE_PAPER: dict[str, Any] = {"energy_without_noise": 0.0, "forces_without_noise": 0.0, "common_energy": 1.0}
# the values used before these settings existed; older result files lack them
FORMERLY: dict[str, Any] = AS_IN_THE_PAPER | {"last_rate": 0.0, "balance": 0.0, "tangent": False}

COMPARED = {
    "p+no-tangent": Variant({"tangent": False}),
    "p+novelty": Variant(of="p+no-tangent", make=_with_widths_from_novelty),
    "p+paper": Variant({"start": 0.0, **AS_IN_THE_PAPER}, {"noise_dim": 32}),
    # The published schedule counts steps but is advanced once per epoch, so learning rates rise until the end. The BLIP
    # paper does not mention beta2 of AdamW or weight averaging: the usual 0.999 and no averaging are used.
    "blip+published": Variant(
        {
            **AS_IN_THE_PAPER,
            "second_moment": 0.999,
            "average": 0.0,
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

# The tuning of CHGNet: the same number of trials for each method. Each trial changes the settings in BEFORE.
BEFORE = FinetuneConfig(steps=200, start=0.0, **FORMERLY)
TRIALS: dict[str, dict[str, Variant]] = {
    "p": {
        "paper": COMPARED["p+paper"],
        "128-dimensions": Variant({}, {"noise_dim": 128}),
        "start-1": Variant({"start": 1.0}, {"noise_dim": 32}),
        "start-1-128-dimensions": Variant({"start": 1.0}, {"noise_dim": 128}),
    },
    "blip": {
        "as-is": Variant(),
        "noise-1e-2": Variant({"noise_rate": 1e-2}),
        "offset-4": Variant({"noise_rate": 1e-2}, {"offset": 4.0}),
        "offset-4-wide": Variant({"noise_rate": 1e-2}, {"offset": 4.0, "prior": 0.1, "largest": 0.5}),
    },
    "mc-dropout": {
        "share-0.0003": Variant({}, {"share": 0.0003}),
        "share-0.001": Variant({}, {"share": 0.001}),
        "share-0.005": Variant({}, {"share": 0.005}),
        "share-0.01": Variant({}, {"share": 0.01}),
    },
    "deterministic": {
        "as-is": Variant(),
        "backbone-2e-3": Variant({"backbone_rate": 2e-3}),
        "backbone-4e-3": Variant({"backbone_rate": 4e-3}),
        "backbone-6e-3": Variant({"backbone_rate": 6e-3}),
    },
}

# Other trials: the usual beta2 of AdamW, other energy weights and energy losses, learning rates that do not fall to
# zero, and settings that could improve the forces of P.
FIXED = 1e-9  # learning rate that keeps the noise weights constant: only the backbone is trained
_ENERGIES = {"energy_without_noise": 1.0, "common_energy": 0.1}
_FORCES = {"start": 1.0, "forces_without_noise": 1.0, **_ENERGIES}
_BALANCED = {**_FORCES, "last_rate": 0.3, "balance": 1.0}
ATTEMPTS = {
    "p+second-moment-0.999": Variant({"start": 0.0, "second_moment": 0.999}, {"noise_dim": 32}),
    "blip+second-moment-0.999": Variant({"second_moment": 0.999}),
    "deterministic+second-moment-0.999": Variant({"second_moment": 0.999}),
    "deterministic+common-energy-0.1": Variant({"common_energy": 0.1}),
    "blip+common-energy-0.1": Variant({"common_energy": 0.1, "second_moment": 0.999}),
    "mc-dropout+common-energy-0.1": Variant({"common_energy": 0.1}),
    "p+energy-without-noise-common-0.1": Variant({"start": 1.0, **_ENERGIES}),
    "p+forces-without-noise": Variant(_FORCES),
    "p+forces-without-noise-3": Variant({**_FORCES, "forces_without_noise": 3.0}),
    "p+forces-without-noise-start-0.5": Variant({**_FORCES, "start": 0.5}),
    "p+last-rate-0.3": Variant({**_FORCES, "last_rate": 0.3}),
    "p+last-rate-0.3-noise-1e-3-start-2": Variant({**_FORCES, "last_rate": 0.3, "noise_rate": 1e-3, "start": 2.0}),
    "p+last-rate-0.3-fixed-noise-start-2": Variant({**_FORCES, "last_rate": 0.3, "noise_rate": FIXED, "start": 2.0}),
    "p+balanced": Variant(_BALANCED),
    "p+balanced-energy-0.01": Variant({**_BALANCED, "energy": 0.01}),
    "p+balanced-energy-0.2": Variant({**_BALANCED, "energy": 0.2}),
    "deterministic+last-rate-0.3": Variant({"common_energy": 0.1, "last_rate": 0.3}),
    "deterministic+last-rate-0.3-energy-0.01": Variant({"common_energy": 0.1, "last_rate": 0.3, "energy": 0.01}),
    "deterministic+last-rate-0.3-energy-0.2": Variant({"common_energy": 0.1, "last_rate": 0.3, "energy": 0.2}),
    "blip+last-rate-0.3": Variant({"common_energy": 0.1, "second_moment": 0.999, "last_rate": 0.3}),
    "mc-dropout+last-rate-0.3": Variant({"common_energy": 0.1, "last_rate": 0.3}),
}


# What tangent samples cover.
COVERED = {
    f"p+tangent-{cover.replace('+', '-')}": Variant(of="p+no-tangent", make=partial(_with_tangents, cover=cover))
    for cover in COVERS
}


def trials(names: list[str]) -> list[str]:
    """The names of all trials of these methods. "method+trial" selects one trial, also from ATTEMPTS."""
    found = []
    for method in names:
        if method not in TRIALS and "+" not in method:
            raise ValueError(f"unknown method {method!r}; allowed: {', '.join(TRIALS)}")
        found += [method] if "+" in method else [f"{method}+{name}" for name in TRIALS[method]]
    return found


VARIANTS = (
    TUNED
    | COMPARED
    | ATTEMPTS
    | COVERED
    | {f"{method}+{name}": variant for method, own in TRIALS.items() for name, variant in own.items()}
)
