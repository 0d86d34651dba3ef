"""Runs the cells of the silica benchmark: every method fine-tunes the same pretrained potential."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ase import Atoms
from rich.console import Console

from pmlip import methods
from pmlip.backbones import load_backbone
from pmlip.errors import did_you_mean
from pmlip.evaluation import compare, evaluate, rank_together
from pmlip.methods import Method
from pmlip.noise.draws import SEED_OF_FIT
from pmlip.provenance import environment
from pmlip.score_table import benchmark_scores
from pmlip.spread_fit import best_factor
from pmlip.structures.labels import labels
from pmlip.training.config import FinetuneConfig
from pmlip_bench.finetuned import fine_tuned, training_cost, weights
from pmlip_bench.publish import check_installed, publish
from pmlip_bench.runner import Cell, check_settings, read_cells, run_cells, run_rounds, settings_of, slug
from pmlip_bench.silica.data import SilicaSettings, Splits, check_files, splits, stem, without_folder
from pmlip_bench.silica.tables import figure, summary, table
from pmlip_bench.silica.variants import FORMERLY, VARIANTS, Variant


def run(
    settings: SilicaSettings,
    *,
    names: Sequence[str],
    sizes: Sequence[int],
    seeds: int,
    folder: Path,
    jobs: int,
    console: Console,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Run the unfinished cells, write the table and the figure of all finished cells, and return the table's rows."""
    check_installed()
    for name in names:
        methods.check(method := name.partition("+")[0])
        if "+" in name and name not in VARIANTS:
            own = [variant for variant in VARIANTS if variant.startswith(f"{method}+")]
            allowed = ", ".join([method, *own])
            raise ValueError(f"unknown variant {name!r}; allowed: {allowed}{did_you_mean(name, own)}")
    for size in sizes:
        splits(size, settings)  # raises an error if there are too few structures
    check_files(settings, load_backbone(settings.backbone, weights=settings.weights, trust=settings.trust))
    prefix = f"{slug(settings.backbone)}-{slug(stem(settings.data))}"
    cells = [Cell(f"{prefix}-{name}", size, seed) for size in sizes for name in names for seed in range(seeds)]
    rounds = _rounds(cells)
    _check_stored(prefix, settings, folder)
    _check_weights([cell for cells in rounds for cell in cells], folder)
    job = partial(work, settings=settings, folder=folder, device=device)
    try:
        run_rounds(rounds, lambda part: run_cells(part, job, folder, jobs=jobs, console=console))
    finally:  # also when a cell failed: show the finished cells
        rows = publish(folder, table=table, summary=summary, figure=figure, console=console)
    return rows


def _rounds(cells: Sequence[Cell]) -> list[list[Cell]]:
    """These cells and all cells that they are made of; each round is made of cells of earlier rounds."""
    depths: dict[Cell, int] = {}

    def add(cell: Cell) -> int:
        depths[cell] = 1 + max((add(part) for part in made_of(cell)), default=-1)
        return depths[cell]

    deepest = max(add(cell) for cell in cells)
    return [[cell for cell in depths if depths[cell] == depth] for depth in range(deepest + 1)]


def _check_stored(prefix: str, settings: SilicaSettings, folder: Path) -> None:
    """Check the settings of all stored cells of this backbone and data set, because one table shows them together."""
    stored = {cell: result for cell, result in read_cells(folder).items() if cell.method.startswith(f"{prefix}-")}
    hashes = {size: splits(size, settings).hash for size in {cell.size for cell in stored}}
    for cell, result in stored.items():
        # older result files lack the settings in FORMERLY
        stored_settings = settings_of(file := cell.file(folder), result)
        complete = stored_settings | {"config": FORMERLY | dict(stored_settings.get("config", {}))}
        check_settings(file, complete, _described(settings, cell, hashes[cell.size]))


def _check_weights(composed: Sequence[Cell], folder: Path) -> None:
    """Check that the models a cell is built from have their weights, or will be trained first."""
    for cell in composed:
        for part in made_of(cell):
            if not cell.file(folder).exists() and part.file(folder).exists() and not weights(part, folder).exists():
                raise FileNotFoundError(
                    f"{cell.name} needs the weights {weights(part, folder)}, which exist only on the machine that "
                    f"trained them; delete {part.file(folder)} to train them again"
                )


def _method(cell: Cell) -> str:
    return cell.method.split("-", 2)[2]


def made_of(cell: Cell) -> list[Cell]:
    """The cells whose fine-tuned models this cell is built from; empty if the cell fine-tunes a model itself."""
    name = _method(cell)
    if of := _variant(cell).of:
        return [replace(cell, method=cell.method.removesuffix(name) + of)]
    built = None if "+" in name else methods.built_from(name)
    if built is None:
        return []
    part = replace(cell, method=cell.method.removesuffix(name) + built.method)
    if not built.several:
        return [part]
    first = cell.seed - cell.seed % 4  # as in the paper: the three other seeds of each group of four
    return [replace(part, seed=seed) for seed in range(first, first + 4) if seed != cell.seed]


def _variant(cell: Cell) -> Variant:
    return VARIANTS.get(_method(cell), Variant())


def _config(settings: SilicaSettings, cell: Cell) -> FinetuneConfig:
    return replace(settings.config, **_variant(cell).config)


def _described(settings: SilicaSettings, cell: Cell, structures: str) -> dict[str, Any]:
    """The settings as stored in the result file; file names without folders, to be the same on every machine.

    structures: hash of all structures of the cell, because files with the same name can differ.
    """
    content = asdict(replace(settings, config=_config(settings, cell)))
    content["data"] = without_folder(settings.data)
    content["test_data"] = without_folder(settings.test_data) if settings.test_data else None
    content["unseen"] = [without_folder(file) for file in settings.unseen]
    content["weights"] = Path(settings.weights).name if settings.weights else None
    content["structures"] = structures
    if options := _variant(cell).options:
        content["options"] = options
    read_back: dict[str, Any] = json.loads(json.dumps(content))
    return read_back


def work(cell: Cell, *, settings: SilicaSettings, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Fine-tune the method of a cell, or build it from fine-tuned models, and return its scores."""
    data = splits(cell.size, settings)
    if parts := made_of(cell):
        for part in parts:  # other cells may need it too and must not train it at the same time
            if not weights(part, folder).exists():
                raise FileNotFoundError(
                    f"{cell.name} is built from {part.name}, which is not fine-tuned; run {part.name} first"
                )
        if _variant(cell).of:
            model = _fine_tuned(cell, data, settings, folder, device)
            training = training_cost(model)
        else:
            tuned = [_fine_tuned(part, data, settings, folder, device) for part in parts]
            model = methods.build(_method(cell), tuned, train=data.train, valid=data.valid)
            training = _summed([training_cost(part) for part in tuned])
    else:
        model = _fine_tuned(cell, data, settings, folder, device)
        training = training_cost(model)
    factor, energy_factor = _spread_factors(model, data.valid, settings)
    as_trained = evaluate(model, data.test, samples=settings.test_samples)
    inside = as_trained.scaled(factor, energy=energy_factor)
    named = {"backbone": settings.backbone, "data": stem(settings.data), "method": _method(cell)}
    result: dict[str, Any] = {
        "cell": named | {"size": cell.size, "seed": cell.seed},
        "samples": inside.samples,
        "spread_factor": factor,
        "energy_spread_factor": energy_factor,
        "test": benchmark_scores(inside.scores),
        "test_as_trained": benchmark_scores(as_trained.scores),
        **({"test_three_samples": benchmark_scores(inside.subset(3).scores)} if inside.samples > 3 else {}),
        "all_scores": inside.scores,
        "unseen": {},
        "training": training,
        "prediction": {
            "seconds": round(inside.seconds, 1),
            "passes": model.passes(inside.samples) * inside.structures,
        },
    }
    has_spread = bool(inside.spread.any())
    outside = {}
    for place, structures in data.unseen.items():
        outside[place] = evaluate(model, structures, samples=settings.test_samples)
        outside[place] = outside[place].scaled(factor, energy=energy_factor)
        against = compare(inside, outside[place]) if has_spread else {}
        result["unseen"][place] = benchmark_scores(outside[place].scores) | against
    if has_spread and outside:
        result["test_and_unseen"] = rank_together([inside, *outside.values()])
        # to compare with ensembles, which have three samples
        three = {place: other.subset(3) for place, other in outside.items()}
        result["unseen_three_samples"] = {place: compare(inside.subset(3), other) for place, other in three.items()}
        result["test_and_unseen_three_samples"] = rank_together([inside.subset(3), *three.values()])
    return {**result, "settings": _described(settings, cell, data.hash), **environment()}


def _spread_factors(model: Method, valid: Sequence[Atoms], settings: SilicaSettings) -> tuple[float, float]:
    """The factors on the spread of forces and energies that minimise the CRPS on the validation data.

    1 for the Gaussians, which are already fitted on the validation data, and for ensembles, which have too few samples
    to fit a factor. The forces of tangent samples are already fitted, too.
    """
    if model.fixed_samples is not None or model.learner().needs_validation:
        return 1.0, 1.0
    # other samples than in the test, so that the test does not see the samples the factor was fitted on
    drawn, target = model.sample(valid, samples=settings.test_samples, seed=SEED_OF_FIT), labels(valid)
    atoms = target.atoms_per_system
    has_tangent_samples = not model.members_are_whole
    return (
        1.0 if has_tangent_samples else best_factor(drawn.forces.double(), target.forces),
        best_factor(drawn.energy.double() / atoms, target.energy / atoms),
    )


def _fine_tuned(cell: Cell, data: Splits, settings: SilicaSettings, folder: Path, device: str) -> Method:
    """The fine-tuned model of a cell. Weights and settings are saved, for cells that are built from this model."""
    variant = _variant(cell)
    return fine_tuned(
        cell,
        folder,
        method=_method(cell).partition("+")[0],
        backbone=load_backbone(settings.backbone, weights=settings.weights, trust=settings.trust, device=device),
        train=data.train,
        valid=data.valid,
        config=_config(settings, cell),
        settings=_described(settings, cell, data.hash),
        device=device,
        options=variant.options,
        make=partial(_made, cell, data, settings, folder, device) if variant.of else None,
    )


def _made(cell: Cell, data: Splits, settings: SilicaSettings, folder: Path, device: str) -> Method:
    """The model of a variant that is made from another fine-tuned model."""
    (part,) = made_of(cell)
    return _variant(cell).made(_fine_tuned(part, data, settings, folder, device), data)


def _summed(costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Total cost of several fine-tuning runs; all other entries are taken from the first run."""
    return costs[0] | {key: sum(cost[key] for cost in costs) for key in ("steps", "structures", "passes", "seconds")}
