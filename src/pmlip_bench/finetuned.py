"""Fine-tuned models of benchmark cells. Each is trained once, and kept in a file with a note of its settings."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from ase import Atoms

from pmlip import methods
from pmlip.atomic_files import read_json, write_json
from pmlip.backbones import Backbone
from pmlip.loading import load
from pmlip.methods import Method
from pmlip.training.config import FinetuneConfig
from pmlip.training.finetuning import finetune
from pmlip_bench.runner import Cell


def weights(cell: Cell, folder: Path) -> Path:
    return folder / "weights" / f"{cell.name}.pt"


def fine_tuned(
    cell: Cell,
    folder: Path,
    *,
    method: str,
    backbone: Backbone,
    train: Sequence[Atoms],
    valid: Sequence[Atoms],
    config: FinetuneConfig,
    settings: dict[str, Any],
    device: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    make: Callable[[], Method] | None = None,
) -> Method:
    """The fine-tuned model of a cell: read from its file if that was made with these settings, otherwise trained.

    settings: everything the model depends on, as it is read back from JSON. options: of the method. make: makes the
    model from another fine-tuned model, instead of training.
    """
    file = weights(cell, folder)
    note = file.with_suffix(".json")
    if file.exists() and note.exists() and read_json(note) == settings:
        stored: Method = load(file, backbone=backbone, device=device)
        return stored
    unfinished = file.with_suffix("")
    if make:
        model = make()
    else:
        torch.manual_seed(cell.seed)  # initial values of the parameters that a method adds to the backbone
        model = methods.make(method, backbone, **options)
        finetune(model, train, valid=valid, config=replace(config, seed=cell.seed), folder=unfinished)
    if model.name == method:  # a variant can be another method around the same potential, which is made again quickly
        model.save(file)
        write_json(note, settings)
    shutil.rmtree(unfinished, ignore_errors=True)
    return model


def training_cost(model: Method) -> dict[str, Any]:
    """Cost and validation curve of a fine-tuning run."""
    history = model.history
    assert history is not None
    return {
        "steps": history.steps,
        "structures": history.steps * history.config["batch"],
        "passes": history.passes,
        "seconds": history.seconds,
        "error_before": dict(history.error_before),
        "noise_rate": history.noise_rate,
        "validation_curve": list(history.validation_curve),
    }
