"""What comes before the first step of a fine-tuning: labels are checked, offsets fitted, errors measured."""

from collections.abc import Sequence

import torch
from ase import Atoms

from pmlip.methods.base import FIXED_ATOMS, Method
from pmlip.structures.energy_offsets import fit_offsets
from pmlip.structures.labels import check_labels, labels
from pmlip.training.config import FinetuneConfig


def check_validation(held_out: Sequence[Atoms], config: FinetuneConfig) -> None:
    """Validation structures must carry what is learned."""
    found = labels(held_out)
    if not any(bool(found[name].isfinite().any()) for name in config.learned):
        raise ValueError(
            f"the validation structures carry none of {', '.join(config.learned)}; Atoms.copy() leaves labels behind"
        )
    try:
        check_labels(held_out, config.learned, missing=config.missing)
    except ValueError as error:
        raise ValueError(f"of the validation structures: {error}") from error


def prepare(model: Method, train: Sequence[Atoms], config: FinetuneConfig) -> tuple[dict[int, float], dict[str, float]]:
    """Move energy offsets into the backbone; these, and the mean absolute error of each label before fine-tuning."""
    target, outputs = labels(train), model.predict(train, chunk_atoms=FIXED_ATOMS)
    offsets: dict[int, float] = {}
    energy = outputs.energy.double()
    if config.offsets and bool(target.energy.isfinite().any()):
        offsets = fit_offsets(target.energy.numpy(), energy.numpy(), train)
        model.backbone.shift_references(offsets)
        shift = [sum(offsets.get(int(number), 0.0) for number in atoms.numbers) for atoms in train]
        energy = energy + torch.tensor(shift, dtype=torch.float64)
    errors = {"energy": (energy - target.energy) / target.atoms_per_system}
    errors |= {name: outputs[name].double() - target[name] for name in ("forces", "stress") if name in outputs}
    scales = {}
    for name, error in errors.items():
        present = error[error.isfinite()]
        if len(present) and config.weights[name] > 0:
            # an error of zero would make the weight infinite: the model knows these labels already
            scales[name] = max(float(present.abs().mean()), 1e-6)
    if not scales:
        raise ValueError("no label that the model predicts and that has a weight in the loss is there to learn from")
    return offsets, scales
