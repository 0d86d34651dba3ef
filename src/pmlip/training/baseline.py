"""Preparation of fine-tuning: check the labels, fit energy offsets, measure the errors."""

import warnings
from collections.abc import Mapping

import torch

from pmlip.methods.base import FIXED_ATOMS, Method
from pmlip.structures.atoms import StructureError
from pmlip.structures.energy_offsets import NOTHING, fit_offsets, force_unit_problem
from pmlip.structures.labels import check_labels
from pmlip.training.batches import LabelledStructures
from pmlip.training.config import FinetuneConfig


def check_validation(valid: LabelledStructures, config: FinetuneConfig) -> None:
    """Raise ValueError if validation structures lack labels that the run trains on."""
    if not any(bool(valid.labels[name].isfinite().any()) for name in config.learned):
        raise ValueError(
            f"the validation structures carry none of {', '.join(config.learned)}; Atoms.copy() drops labels"
        )
    try:
        check_labels(valid.structures, valid.labels, config.learned, missing=config.missing)
    except StructureError as error:
        raise StructureError(error.atoms, error.index, f"for validation, {error.problem}") from None
    except ValueError as error:
        raise ValueError(f"for validation, {error}") from error


def fit_offsets_and_measure_errors(
    model: Method,
    train: LabelledStructures,
    config: FinetuneConfig,
    references: Mapping[int, float] = NOTHING,
) -> tuple[dict[int, float], dict[str, float]]:
    """Fit energy offsets and add them to the backbone; returns them and the MAE of each label before fine-tuning.

    references: energies of isolated atoms, by atomic number.
    """
    target, outputs = train.labels, model.predict(train.structures, chunk_atoms=FIXED_ATOMS)
    offsets: dict[int, float] = {}
    energy = outputs.energy.double()
    if config.offsets and bool(target.energy.isfinite().any()):
        own = model.backbone.references()
        known = {number: value - own[number] for number, value in references.items() if number in own}
        offsets = fit_offsets(target.energy.numpy(), energy.numpy(), train.structures, known=known)
        model.backbone.shift_references(offsets)
        shift = [sum(offsets.get(int(number), 0.0) for number in atoms.numbers) for atoms in train.structures]
        energy = energy + torch.tensor(shift, dtype=torch.float64)
    if problem := force_unit_problem(target.forces.numpy(), outputs.forces.double().numpy()):
        warnings.warn(f"{problem}; check that the forces are in eV/Å", stacklevel=2)
    errors = {"energy": (energy - target.energy) / target.atoms_per_system}
    errors |= {name: outputs[name].double() - target[name] for name in ("forces", "stress") if name in outputs}
    scales = {}
    for name, error in errors.items():
        present = error[error.isfinite()]
        if len(present) and config.weights[name] > 0:
            # the lower limit keeps the loss weight finite if the model already reproduces the labels
            scales[name] = max(float(present.abs().mean()), 1e-6)
    if not scales:
        raise ValueError("nothing to train on: no label present has a non-zero weight")
    return offsets, scales
