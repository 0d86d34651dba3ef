"""Tuning trials of each method on validation data, and ablations of P-EGNN, on the N-body task.

Every method has the same number of trials, all at n = 1000 and seed 0. The first trials change one setting: settings
common to all methods, then settings of the method. The last trials combine changes that helped.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pmlip.atomic_files import atomic_write
from pmlip_bench.nbody.cells import RECIPES, NBodySettings, Preset, prepare, work
from pmlip_bench.nbody.tables import SCALES
from pmlip_bench.nbody.training import Recipe
from pmlip_bench.runner import Cell, read_cells, run_cells

START = Recipe()  # the baseline; each trial changes it

ALL_METHODS: dict[str, dict[str, Any]] = {
    "start": {},
    "short": {"epochs": 75},
    "long": {"epochs": 300},
    "decay-0.03": {"weight_decay": 0.03},
    "decay-0.3": {"weight_decay": 0.3},
    "rate-1e-3": {"learning_rate": 1e-3},
    "rate-4e-3": {"learning_rate": 4e-3},
    "batch-50": {"batch": 50, "epochs": 75},
    "last-weights": {"average": 0.0},
    "unclipped": {"clip": 100.0},
    "charge": {"network": {"node_input": "charge"}},
    "sharpness-aware": {"sharpness": 0.05, "epochs": 75},
}
# trials with Muon for all methods, with the changes that had helped most
ORTHOGONAL: dict[str, dict[str, Any]] = {
    "orthogonal": {"orthogonal": True},
    "orthogonal-rate-4e-3": {"orthogonal": True, "learning_rate": 4e-3},
    "orthogonal-rate-4e-3-decay-0.3": {"orthogonal": True, "learning_rate": 4e-3, "weight_decay": 0.3},
}
OF_METHOD: dict[str, dict[str, dict[str, Any]]] = {
    "egnn": {
        "start-distance": {"network": {"distance": "start"}},
        "batch-200-long": {"batch": 200, "epochs": 300},
        "rate-8e-3": {"learning_rate": 8e-3},
        "rate-4e-3-long": {"learning_rate": 4e-3, "epochs": 300},
        "rate-4e-3-decay-0.03": {"learning_rate": 4e-3, "weight_decay": 0.03},
        "rate-8e-3-long": {"learning_rate": 8e-3, "epochs": 300},
        "rate-4e-3-decay-0.3": {"learning_rate": 4e-3, "weight_decay": 0.3},
        **ORTHOGONAL,
    },
    "blip": {
        "beta-1e-3": {"options": {"beta": 1e-3}},
        "beta-1e-4": {"options": {"beta": 1e-4}},
        "beta-1e-5": {"options": {"beta": 1e-5}},
        "rate-4e-3-beta-1e-3": {"learning_rate": 4e-3, "options": {"beta": 1e-3}},
        "rate-4e-3-beta-1e-4": {"learning_rate": 4e-3, "options": {"beta": 1e-4}},
        "rate-4e-3-long-beta-1e-4": {"learning_rate": 4e-3, "epochs": 300, "options": {"beta": 1e-4}},
        "long-beta-1e-3": {"epochs": 300, "options": {"beta": 1e-3}},
        **{f"{name}-beta-1e-3": change | {"options": {"beta": 1e-3}} for name, change in ORTHOGONAL.items()},
    },
    "mc-dropout": {
        "share-0.02": {"options": {"share": 0.02}},
        "share-0.05": {"options": {"share": 0.05}},
        "share-0.2": {"options": {"share": 0.2}},
        "rate-4e-3-share-0.02": {"learning_rate": 4e-3, "options": {"share": 0.02}},
        "rate-4e-3-share-0.05": {"learning_rate": 4e-3, "options": {"share": 0.05}},
        "rate-4e-3-long": {"learning_rate": 4e-3, "epochs": 300},
        "rate-4e-3-long-share-0.05": {"learning_rate": 4e-3, "epochs": 300, "options": {"share": 0.05}},
        **ORTHOGONAL,
    },
    "p-egnn": {
        "decay-noise": {"decay_noise": True},
        "few-then-ten-samples": {"samples": (4, 10)},
        "almost-fair": {"options": {"fairness": 0.95}},
        "rate-4e-3-long": {"learning_rate": 4e-3, "epochs": 300},
        "rate-4e-3-decay-0.03": {"learning_rate": 4e-3, "weight_decay": 0.03},
        "rate-8e-3": {"learning_rate": 8e-3},
        "rate-4e-3-long-decay-0.03": {"learning_rate": 4e-3, "epochs": 300, "weight_decay": 0.03},
        **ORTHOGONAL,
    },
}

# Ablations that the paper does not test. Each changes the tuned P-EGNN. There, particles share the noise, noise enters
# at the first layers, noise weights start at zero, the noise dimension is 32, and K = 4.
ABLATIONS: dict[str, dict[str, Any]] = {
    "noise-per-particle": {"options": {"particles": 5}},
    "every-layer": {"options": {"every_layer": True}},
    "small-start": {"options": {"start": 0.01}},
    "noise-dim-4": {"options": {"noise_dim": 4}},
    "noise-dim-128": {"options": {"noise_dim": 128}},
    "samples-2": {"samples": (2, 2)},
    "samples-10": {"samples": (10, 10)},
    "random-start": {"options": {"start": 0.1}},  # shifts are about half as large as the output of the layer
    "random-start-dim-128": {"options": {"start": 0.1, "noise_dim": 128}},
    "random-start-0.3-dim-128": {"options": {"start": 0.3, "noise_dim": 128}},
}

# AdamW with twice the passes, for methods and sizes that use Muon by default: recipe and training sizes
_BEFORE: dict[str, Any] = {"orthogonal": False, "epochs": 300, "learning_rate": 2e-3}
ADAMW: dict[str, tuple[Recipe, tuple[int, ...]]] = {
    "p-egnn+adamw": (replace(RECIPES["p-egnn"], many=None), (10_000,)),
    "egnn+adamw": (replace(RECIPES["egnn"], many=None), (10_000,)),
    "blip+adamw": (replace(RECIPES["blip"], **_BEFORE), (1000, 3000)),
    "mc-dropout+adamw": (replace(RECIPES["mc-dropout"], **_BEFORE), (1000, 3000)),
}


def trials(methods: Sequence[str]) -> dict[str, Recipe]:
    """The recipe of every trial of these methods, by "method+trial"."""
    for method in methods:
        if method not in OF_METHOD:
            raise ValueError(f"unknown method {method!r}; allowed: {', '.join(OF_METHOD)}")
    return {
        f"{method}+{name}": replace(START, **change)
        for method in methods
        for name, change in (ALL_METHODS | OF_METHOD[method]).items()
    }


def ablations() -> dict[str, Recipe]:
    """The recipe of every ablation, by "p-egnn+ablation"."""
    tuned = RECIPES["p-egnn"]
    changed = {}
    for name, change in ABLATIONS.items():
        merged = {**change, "options": tuned.options | change.get("options", {})}
        changed[f"p-egnn+{name}"] = replace(tuned, **merged)
    return changed


def tune(methods: Sequence[str], folder: Path, *, jobs: int, console: Console) -> None:
    """Train each trial of these methods, score it on the validation data, and write the table."""
    preset = Preset(NBodySettings(), trials(tuple(OF_METHOD)), validation_only=True)
    _run([Cell(name, 1000, 0) for name in trials(methods)], preset, folder, jobs=jobs, console=console)


def ablate(folder: Path, *, seeds: int, jobs: int, console: Console) -> None:
    """Train and test each ablation, and write the table."""
    sizes = dict.fromkeys(ablations(), (1000,)) | {name: sizes for name, (_, sizes) in ADAMW.items()}
    cells = [Cell(name, size, seed) for name, own in sizes.items() for size in own for seed in range(seeds)]
    recipes = ablations() | {name: recipe for name, (recipe, _) in ADAMW.items()}
    _run(cells, Preset(NBodySettings(), recipes), folder, jobs=jobs, console=console)


def _run(cells: Sequence[Cell], preset: Preset, folder: Path, *, jobs: int, console: Console) -> None:
    """Run the unfinished cells, then write the table of all finished cells."""
    prepare(cells, preset, folder, seeds=0)
    try:
        run_cells(cells, partial(work, preset=preset, folder=folder, seeds=0), folder, jobs=jobs, console=console)
    finally:
        text = table(read_cells(folder))
        with atomic_write(folder / "table.md") as file:
            file.write(text.encode())
        console.print(text, soft_wrap=True, markup=False)


def table(results: dict[Cell, dict[str, Any]]) -> str:
    """Markdown table of validation scores, best during training and at the end; sorted by method and best CRPS."""
    lines = [
        "| method | variant | seed | best: epoch, CRPS x 1e2, SSR | end: epoch, MSE x 1e3 | CRPS x 1e2 | SSR | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def best(result: dict[str, Any]) -> dict[str, float]:
        return min(result["validation_curve"], key=lambda point: point["crps"], default={})

    def order(item: tuple[Cell, dict[str, Any]]) -> tuple[str, float]:
        return item[0].method.partition("+")[0], best(item[1]).get("crps", math.inf)

    for cell, result in sorted(results.items(), key=order):
        method, _, variant = cell.method.partition("+")
        if "diverged" in result:
            lines.append(f"| {method} | {variant} | {cell.seed} | diverged | | | | |")
            continue
        end, top = result["validation_curve"][-1], best(result)
        scores = (f"{scale * end[name]:.2f}" if name in end else "" for name, scale in SCALES.items())
        ratio = f", {top['ssr']:.2f}" if "ssr" in top else ""
        at_best = f"{top['epoch']}, {1e2 * top['crps']:.2f}{ratio}"
        cells = [method, variant, cell.seed, at_best, f"{end['epoch']}, {next(scores)}", *scores, f"{end['loss']:.4f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
