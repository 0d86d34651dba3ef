"""pmlip fold: one sample as an ordinary file of the potential's own package."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pmlip.cli.checks import check_new_file
from pmlip.cli.options import AsJson, Model, Trust, Weights, print_json
from pmlip.run_folder import model_file


def fold(
    model: Model,
    *,
    sample: Annotated[int, typer.Option(min=0, help="Number of the sample, counted from 0.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    weights: Weights = None,
    trust: Trust = False,
    out: Annotated[
        Path,
        typer.Option(
            help="File to write, in the format of the potential's own package. It must not exist yet.",
            rich_help_panel="Output",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Write one sample of a model as an ordinary file of the potential's own package.

    A sample of CHGNet or Orb can then be used without pmlip. A sample of MACE still needs pmlip, and the file format of
    SevenNet cannot store one. The tangent part of a sample is left out: no ordinary potential can hold it.

    Example: pmlip fold p-chgnet/model.pt --sample 3 --out sample-3.pth.tar
    """
    from pmlip.loading import load

    model = model_file(model)
    console = Console(quiet=as_json)
    check_new_file(out)
    loaded = load(model, weights=weights, trust=trust)
    if loaded.fixed_samples != 1:  # a method with a single sample needs no spread
        loaded.spread_samples(2)
    folded = loaded.member(sample, seed=seed)
    folded.save(out)
    backbone = f"{folded.name}:{folded.variant}"
    console.print(f"sample {sample} of seed {seed} was written to {out} as an ordinary {backbone}")
    if not loaded.members_are_whole:
        console.print(
            "The file leaves out the tangent part of the sample, so it varies too little on structures unlike the "
            "training set. For whole samples, use PMLIPCalculator.members or propagate in Python."
        )
    print_json(
        {"backbone": backbone, "sample": sample, "seed": seed, "out": str(out), "whole": loaded.members_are_whole},
        as_json,
    )
