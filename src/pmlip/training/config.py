"""The settings of a fine-tuning, checked when they are made."""

import math
from dataclasses import dataclass

from pmlip import losses
from pmlip.structures import LABELS


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    steps: int | None = None  # in all; by default about 600, and at least 10 passes over the training set
    epochs: int | None = None  # passes over the training set, instead of steps
    batch: int = 4  # structures in a step, over all processes
    samples: int = 4  # noise draws per structure in the loss
    backbone_rate: float | None = None  # learning rate of the backbone's weights; by default what suits the potential
    noise_rate: float | None = None  # of what comes with the method; by default by how the potential responds to noise
    start: float | None = None  # random noise weights: 1 (default) for a spread as large as the error, 0 for none
    balance: float = 1.0  # of that start: 1 if all sites shall have the same part in the spread, 0 for the same weights
    warm_up: float = 0.2  # share of the steps in which the rates rise; then they fall as a cosine
    last_rate: float = 0.3  # share of the rates that is left at the end
    clip: float = 10.0  # largest norm of the gradient
    second_moment: float = 0.98  # decay of AdamW's mean of squared gradients; with its usual 0.999 losses jump up
    average: float = 0.98  # decay of the running mean of the weights, which is what is kept
    energy: float = 0.05  # weight of the energies, each term measured in units of its error before fine-tuning
    energy_without_noise: float = 1.0  # times that: weight of the energies without noise, for methods that need it
    forces_without_noise: float = 1.0  # times the weight of the forces: that of the forces without noise, likewise
    common_energy: float = 0.1  # share left of the pull on what the energies of a batch have in common, with offsets
    forces: float = 1.0  # weight of the forces
    stress: float = 0.05  # weight of the stress
    fairness: float = 1.0  # below 1 the almost-fair CRPS; above 1 a spread is rewarded more than is proper
    offsets: bool = True  # fit an energy per element to the training set first
    rotate: bool | None = None  # turn structures at random; by default where the backbone is not equivariant
    freeze_backbone: bool = False  # train what comes with the method alone
    missing: bool = False  # whether a structure may lack a label that others carry
    validations: int = 10  # how often the validation set is scored
    validation_samples: int = 16  # noise draws per structure in that score
    patience: int | None = None  # stop after so many validations without a better score; by default never
    chunk: int | None = None  # samples in one pass of a step; by default all. Fewer need less memory and one pass more
    seed: int = 0  # of batches, rotations, noise, and what is held out

    def __post_init__(self) -> None:
        for name in ("batch", "samples", "validations", "validation_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("steps", "epochs", "patience", "chunk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"give steps or epochs, not both, got steps={self.steps} and epochs={self.epochs}")
        for name in ("fairness", "seed", "start", "energy_without_noise", "forces_without_noise"):
            if not (getattr(self, name) or 0) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("backbone_rate", "noise_rate", "clip"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("balance", "warm_up", "last_rate", "common_energy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share, between 0 and 1, got {getattr(self, name)}")
        for name in ("average", "second_moment"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        losses.check_weights(self.weights, allowed=dict.fromkeys(LABELS))

    @property
    def weights(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in LABELS}

    @property
    def learned(self) -> list[str]:
        """The labels that have a weight."""
        return [name for name, weight in self.weights.items() if weight > 0]

    def steps_for(self, structures: int) -> int:
        """Steps in all for a training set of this size."""
        if self.steps is not None:
            return self.steps
        per_epoch = math.ceil(structures / self.batch)
        epochs = max(10, math.ceil(600 / per_epoch)) if self.epochs is None else self.epochs
        return epochs * per_epoch
