"""The settings of a fine-tuning run, checked when they are created."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeVar

from pmlip.limits import check_samples, check_seed
from pmlip.structures import LABELS

T = TypeVar("T")


def setting(default: T, help: str, *, group: str = "Expert") -> T:
    """A dataclass field with a default and a help text; the command line shows it in the panel `group`."""
    return dataclasses.field(default=default, metadata={"help": help, "group": group})


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    steps: int | None = setting(None, "Training steps; by default about 600, and at least 10 epochs.", group="Training")
    epochs: int | None = setting(None, "Passes over the training set; give this or the steps.", group="Training")
    batch: int = setting(
        4, "Structures per training step, summed over all processes; lower it to save memory.", group="Training"
    )
    samples: int = setting(
        4, "Noise samples per structure in the loss; more give a less noisy gradient and cost more time.", group="Noise"
    )
    backbone_rate: float | None = setting(
        None,
        "Peak learning rate of the backbone; lower it if training diverges. Default: set per backbone.",
        group="Training",
    )
    noise_rate: float | None = setting(
        None,
        "Peak learning rate of the parameters the method adds. Default: from the response of the forces to noise.",
        group="Noise",
    )
    start: float | None = setting(
        None,
        "Initial force spread, as a multiple of the force MAE before fine-tuning; 0 starts without noise. "
        "Default: 1 for method p.",
        group="Noise",
    )
    balance: float = setting(1.0, "Initial noise: 1 = equal spread per site, 0 = equal weights.")
    warm_up: float = setting(
        0.2, "Fraction of the steps in which learning rates rise linearly; a cosine decay follows."
    )
    last_rate: float = setting(
        0.3, "Learning rates at the last step, as a fraction of their peak; 0 suits MC dropout better."
    )
    clip: float = setting(
        10.0, "Largest gradient norm, larger gradients are scaled down to it; lower it if training is unstable."
    )
    second_moment: float = setting(
        0.98, "AdamW's beta2, the decay of the squared gradients; losses can jump at the usual 0.999."
    )
    average: float = setting(
        0.98, "Decay of the running mean of the weights, which becomes the model; 0 uses the weights as they are."
    )
    energy: float = setting(
        0.05,
        "Weight of the energy term; each term is its CRPS divided by the MAE before fine-tuning. 0 ignores energies.",
        group="Training",
    )
    energy_without_noise: float = setting(
        1.0, "Weight of the energy error of the noise-free prediction, as a multiple of the energy weight."
    )
    forces_without_noise: float = setting(
        1.0, "Weight of the force error of the noise-free prediction, as a multiple of the force weight."
    )
    common_energy: float = setting(
        0.1, "Factor on the batch-mean energy error in the loss; 1 favours energies over forces. Needs offsets."
    )
    forces: float = setting(
        1.0,
        "Weight of the force term; each term is its CRPS divided by the MAE before fine-tuning. 0 ignores forces.",
        group="Training",
    )
    stress: float = setting(
        0.05,
        "Weight of the stress term; each term is its CRPS divided by the MAE before fine-tuning. 0 ignores stress, for "
        "example if its labels are unreliable.",
        group="Training",
    )
    fairness: float = setting(
        1.0, "1 = fair CRPS, 0 = standard CRPS, between them almost fair; above 1 rewards too large a spread."
    )
    offsets: bool = setting(
        True,
        "Fit one energy offset per element to the training set before training; corrects for different reference "
        "energies of the DFT labels.",
        group="Training",
    )
    rotate: bool | None = setting(
        None, "Rotate training structures at random. Default: only if the backbone is not equivariant."
    )
    tangent: bool = setting(
        True,
        "Add tangent samples after training (method p): the spread then rises out of distribution, and a sample costs "
        "about three passes instead of one.",
        group="Noise",
    )
    freeze_backbone: bool = setting(
        False,
        "Train only the parameters the method adds; noise-free predictions change by the offsets alone.",
        group="Training",
    )
    missing: bool = setting(
        False, "Accept structures that lack a label other structures have; otherwise they are an error.", group="Data"
    )
    validations: int = setting(
        10, "How often the validation set is scored; the best-scored weights are kept. More cost time."
    )
    validation_samples: int = setting(
        16, "Noise samples per structure in each validation; more give a more reliable score and cost time."
    )
    patience: int | None = setting(
        None, "Stop after this many validations without improvement. Default: never.", group="Training"
    )
    chunk: int | None = setting(
        None,
        "Samples per forward pass; lower it if a step runs out of memory, at the cost of one more pass.",
        group="Training",
    )
    seed: int = setting(
        0, "Seed of the batches, rotations and noise, and of the choice of held-out structures.", group="Training"
    )

    def __post_init__(self) -> None:
        for name in ("batch", "samples", "validations", "validation_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("steps", "epochs", "patience", "chunk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"give steps or epochs, not both, got steps={self.steps} and epochs={self.epochs}")
        check_seed(self.seed)
        for name in ("samples", "validation_samples"):
            check_samples(getattr(self, name), name=name)
        for name in ("fairness", "start", "energy_without_noise", "forces_without_noise"):
            if not (getattr(self, name) or 0) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("backbone_rate", "noise_rate", "clip"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("balance", "warm_up", "last_rate", "common_energy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in ("average", "second_moment"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        from pmlip import losses  # imported here, because it imports torch, which the command line's help does not need

        losses.check_weights(self.weights, allowed=dict.fromkeys(LABELS))

    @property
    def weights(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in LABELS}

    @property
    def learned(self) -> list[str]:
        """Labels with a non-zero weight."""
        return [name for name, weight in self.weights.items() if weight > 0]

    def steps_for(self, structures: int) -> int:
        """Total number of steps for a training set of this size."""
        if self.steps is not None:
            return self.steps
        per_epoch = math.ceil(structures / self.batch)
        epochs = max(10, math.ceil(600 / per_epoch)) if self.epochs is None else self.epochs
        return epochs * per_epoch
