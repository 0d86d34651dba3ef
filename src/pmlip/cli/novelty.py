"""pmlip novelty: let a model tell how unusual a structure is, compared with its training set."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pmlip.cli.checks import check_new_file, chosen_device
from pmlip.cli.options import AsJson, Device, Model, SettingsFile, Trust, Weights, print_json
from pmlip.cli.progress import counter, progress_bar
from pmlip.run_folder import model_file

if TYPE_CHECKING:
    from ase import Atoms

    from pmlip.methods.base import Method


def novelty(
    model: Model,
    train: Annotated[Path, typer.Argument(help="Structures the model was trained on; labels are not needed.")],
    *,
    valid: Annotated[
        Path | None,
        typer.Option(
            help="Structures it was not trained on, to set the scale of novelty; with DFT forces, also its error bars.",
            rich_help_panel="Data",
        ),
    ] = None,
    settings_file: SettingsFile = None,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="File of the new model. It must not exist yet.", rich_help_panel="Output")
    ] = Path("with-novelty.pt"),
    as_json: AsJson = False,
) -> None:
    """Let a model tell how unusual a structure is, compared with its training set.

    `pmlip finetune` does this already; use this command for models from before. Without --valid, the scale comes from
    training structures, each left out once, and there are no error bars.

    Example: pmlip novelty p-chgnet/model.pt train.extxyz --valid valid.extxyz --out p-chgnet/with-novelty.pt
    """
    from pmlip.loading import load
    from pmlip.novelty import KINDS
    from pmlip.structures.atoms import in_file
    from pmlip.structures.files import read_structures

    model = model_file(model)
    console = Console(quiet=as_json)
    check_new_file(out)
    loaded = load(model, weights=weights, trust=trust, device=chosen_device(device))
    structures = {file: read_structures(file)[0] for file in (train, valid) if file is not None}
    for file, read in structures.items():
        with in_file(file):
            loaded.backbone.check(read, range(len(read)))
    held_out = structures[valid] if valid else []
    fit_and_print(loaded, structures[train], held_out, kinds=KINDS, console=console)
    loaded.save(out)
    console.print(f"the model with novelty was written to {out}")
    print_json({kind: one.describe() for kind, one in loaded.training_features.items()}, as_json)


def fit_and_print(
    model: "Method", train: "Sequence[Atoms]", valid: "Sequence[Atoms]", *, kinds: Sequence[str], console: Console
) -> None:
    """Store these kinds of features of the training structures in a model, and print the result."""
    from pmlip.novelty import NAMES

    with progress_bar(console) as bar:
        for kind in kinds:
            model.fit_novelty(train, valid=valid, kinds=[kind], progress=counter(bar, f"novelty, {NAMES[kind]}"))
    for training in model.training_features.values():
        console.print(training.describe())
