"""Runs the cells of the N-body benchmark, then writes Table 1 and Figure 1 of the paper."""

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pmlip import metrics
from pmlip.checkpoint import DAMAGES
from pmlip.errors import CheckpointError, did_you_mean, first_reason
from pmlip.nbody import data as nbody_data
from pmlip.nbody.data import NBodyConfig, Trajectories
from pmlip.nbody.egnn import EGNNConfig
from pmlip.nbody.p_egnn import PEGNN, Method
from pmlip.nbody.simulate import TIME_STEP
from pmlip.plain_values import check_type
from pmlip.provenance import environment
from pmlip.samples import Samples
from pmlip.scores import fair_crps
from pmlip.spread_fit import best_factor
from pmlip.tensor_files import CHECKSUM, check_sum, read_tensors, write_tensors
from pmlip_bench.nbody.methods import BLIP, PBLIP, Deterministic, MCDropout, leave_one_out
from pmlip_bench.nbody.tables import METHODS, figure, summary, table
from pmlip_bench.nbody.training import DivergedError, Recipe, train
from pmlip_bench.publish import check_installed, publish
from pmlip_bench.runner import Cell, check_settings, read_cells, run_cells, run_rounds, settings_of

TRAINED: dict[str, Callable[..., Method]] = {
    "egnn": Deterministic,
    "blip": BLIP,
    "mc-dropout": MCDropout,
    "p-egnn": PEGNN,
    "p-blip": PBLIP,
}
ENSEMBLES = {"ensemble": "egnn", "p-ensemble": "p-egnn"}  # ensemble -> the method of its members
WATCHED = 10  # samples for validation during training; the fair CRPS is unbiased for any number of samples


@dataclass(frozen=True, kw_only=True)
class NBodySettings:
    data: NBodyConfig = field(default_factory=NBodyConfig)
    test_samples: int = 100
    validation_samples: int = 50
    at_rest: bool = True  # use the centre-of-mass frame, for all methods
    time_reversal: bool = True  # train on time-reversed trajectories too, for all methods


# The recipe of each method; "method+variant" names the same method with another recipe. Each is the best of 22 trials
# on validation data at n = 1000 (docs/nbody.md). BLIP and MC dropout are better with Muon; EGNN and P-EGNN overfit with
# it. With 10,000 trajectories they no longer overfit, and AdamW does not converge in the given number of passes.
_COMMON: dict[str, Any] = {"shrink": 0.2, "patience": 3}
RECIPES: dict[str, Recipe] = {
    "egnn": Recipe(epochs=300, learning_rate=8e-3, many=10_000, **_COMMON),
    "blip": Recipe(learning_rate=4e-3, orthogonal=True, options={"beta": 1e-3}, **_COMMON),
    "mc-dropout": Recipe(learning_rate=4e-3, orthogonal=True, **_COMMON),
    "p-egnn": Recipe(learning_rate=4e-3, weight_decay=0.03, many=10_000, **_COMMON),
    # the recipe of P-EGNN with the beta of BLIP
    "p-blip": Recipe(learning_rate=4e-3, weight_decay=0.03, many=10_000, options={"beta": 1e-3}, **_COMMON),
}


@dataclass(frozen=True)
class Preset:
    settings: NBodySettings
    recipes: dict[str, Recipe]
    sizes: tuple[int, ...] = (1000, 3000, 10000)  # default training sizes
    validation_only: bool = False  # no test scores: tuning must not use the test data


PRESETS = {
    "quick": Preset(
        NBodySettings(
            data=NBodyConfig(train=400, valid=100, test=200, out_of_distribution=100),
            test_samples=20,
            validation_samples=10,
        ),
        {name: replace(recipe, epochs=3, shrink=0.0) for name, recipe in RECIPES.items()},
        sizes=(200, 400),
    ),
    "full": Preset(NBodySettings(), RECIPES),
}


def run(
    *,
    methods: Sequence[str],
    sizes: Sequence[int],
    seeds: int,
    preset: Preset,
    folder: Path,
    jobs: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Run the unfinished cells, write the table and the figure of all finished cells, and return the table's rows."""
    check_installed()
    for method in methods:
        if method not in METHODS:
            hint = did_you_mean(method, METHODS)
            raise ValueError(f"unknown method {method!r}; allowed: {', '.join(METHODS)}{hint}")
    if seeds < 3 and any(method in ENSEMBLES for method in methods):
        raise ValueError(f"an ensemble leaves out one seed, so it needs at least 3, got seeds={seeds}")
    cells = [Cell(method, size, seed) for size in sizes for method in methods for seed in range(seeds)]
    # ensembles are built from trained models, so these come first
    rounds = [[c for c in cells if c.method not in ENSEMBLES], [c for c in cells if c.method in ENSEMBLES]]
    prepare(cells, preset, folder, seeds=seeds)
    job = partial(work, preset=preset, folder=folder, seeds=seeds)
    try:
        run_rounds(rounds, lambda part: run_cells(part, job, folder, jobs=jobs, console=console))
    finally:  # also when a cell failed: show the finished cells
        rows = publish(folder, table=table, summary=summary, figure=figure, console=console)
    return rows


def prepare(cells: Sequence[Cell], preset: Preset, folder: Path, *, seeds: int) -> None:
    """Before any job starts, check the sizes and the settings of stored cells, and create missing data."""
    held, reversal = preset.settings.data.train, preset.settings.time_reversal
    for cell in cells:
        if cell.size > held:
            raise ValueError(
                f"a training set of {cell.size} is too large: the data has {held} trajectories; choose a smaller size"
            )
        recipe = preset.recipes.get(ENSEMBLES.get(cell.method, cell.method))
        copies = 2 if reversal else 1
        if recipe and cell.size * copies < recipe.batch:
            raise ValueError(
                f"a training set of {cell.size} is too small for a batch of {recipe.batch} trajectories; choose at "
                f"least {math.ceil(recipe.batch / copies)}"
            )
    for cell, result in read_cells(folder).items():
        stored = settings_of(file := cell.file(folder), result)
        members = seeds - 1 if cell in cells else stored.get("members")
        check_settings(file, _completed(stored), _described(cell, preset, members))
    for split in nbody_data.SPLITS:
        nbody_data.load(split, preset.settings.data)


def _described(cell: Cell, preset: Preset, members: int | None) -> dict[str, Any]:
    """The settings of a cell as stored in its result file; members: number of members of an ensemble."""
    recipe = preset.recipes.get(ENSEMBLES.get(cell.method, cell.method))
    described = {**asdict(preset.settings), "recipe": asdict(recipe.at(cell.size)) if recipe else None}
    if cell.method in ENSEMBLES:
        described["members"] = members
    read_back: dict[str, Any] = json.loads(json.dumps(described))  # tuples become lists, as in a file
    return read_back


def _completed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings from a file; recipe fields that did not exist when it was written get their defaults."""
    if not isinstance(settings.get("recipe"), dict):
        return settings
    defaults = json.loads(json.dumps(asdict(Recipe())))
    return settings | {"recipe": defaults | settings["recipe"]}


def work(cell: Cell, *, preset: Preset, folder: Path, seeds: int) -> dict[str, Any]:
    """Train the method of a cell, or build an ensemble from trained models, and return its scores."""
    settings = preset.settings
    sets = {split: _load(split, settings) for split in nbody_data.SPLITS}
    described = {"settings": _described(cell, preset, seeds - 1), **environment("numba")}
    curve: list[dict[str, float]] = []
    if cell.method in ENSEMBLES:
        parts = [Cell(ENSEMBLES[cell.method], cell.size, seed) for seed in range(seeds)]
        members = [_load_trained(part, preset, folder) for part in parts]
        method: Method = leave_one_out([member for member, _ in members])[cell.seed]
        costs = [record["training"] for part, (_, record) in zip(parts, members, strict=True) if part.seed != cell.seed]
        training = {key: sum(cost[key] for cost in costs) for key in ("seconds", "passes")}
    else:
        try:
            method, record = _trained(cell, sets, preset, folder)
        except DivergedError as error:
            if not preset.validation_only:
                raise
            return {"cell": asdict(cell), "diverged": str(error), "validation_curve": [], **described}
        training, curve = record["training"], record["validation_curve"]
    factor = _spread_factor(method, sets["valid"], settings)
    return {
        "cell": asdict(cell),
        **({} if preset.validation_only else _tests(method, sets, settings, factor)),
        "validation_curve": curve,
        "validation_scaled": factor,
        "training": training,
        **described,
    }


def _trained(cell: Cell, sets: dict[str, Trajectories], preset: Preset, folder: Path) -> tuple[Method, dict[str, Any]]:
    """The trained method of a cell, and its training record.

    Both are saved to a file: ensembles need it, and training need not be repeated if the scoring fails.
    """
    file, described = _weights(cell, folder), _described(cell, preset, None)
    if file.exists() and _completed(_read_weights(file)["settings"]) == described:
        return _load_trained(cell, preset, folder)
    torch.manual_seed(cell.seed)
    recipe = preset.recipes[cell.method].at(cell.size)
    method = _make(cell.method, recipe)
    watched = method.fixed_samples or min(WATCHED, preset.settings.validation_samples)
    with warnings.catch_warnings():
        # the compiler reads .grad of BLIP's alpha, which is not a leaf tensor and has no gradient
        warnings.filterwarnings("ignore", message="The .grad attribute")
        done = train(
            method,
            _training_set(sets["train"].first(cell.size), preset.settings),
            recipe,
            epochs=recipe.epochs_for(cell.size),
            seed=cell.seed,
            watch=lambda m: judge(m.sample(sets["valid"], samples=watched), sets["valid"]),
        )
    record = {
        "settings": described,
        "training": {"seconds": done.seconds, "passes": done.passes, "skipped_steps": done.skipped},
        "validation_curve": done.curve,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(file, {**record, "state": done.method.state_dict()})
    return done.method, record


def _spread_factor(method: Method, valid: Trajectories, settings: NBodySettings) -> dict[str, float] | None:
    """The factor on the spread that minimises the CRPS on the validation data, and the scores with this factor.

    None if the number of samples is fixed: samples scaled about the mean of only three cannot be scored fairly.
    """
    if method.fixed_samples is not None or settings.validation_samples < 3:
        return None
    drawn = method.sample(valid, samples=settings.validation_samples)
    factor = best_factor(drawn.positions, valid.target.flatten(0, 1))
    scores = judge(drawn.scaled(factor), valid)
    return {"spread_factor": factor, **scores}


def _tests(
    method: Method, sets: dict[str, Trajectories], settings: NBodySettings, fitted: dict[str, float] | None
) -> dict[str, Any]:
    """Test scores of K samples, of three samples and of the prediction without noise, and the cost of prediction.

    Scores "as trained" use the spread of the model. The others use the spread times the factor fitted on the validation
    data. Ensembles of three are not scaled, because they have too few samples to fit a factor.
    """
    data = sets["test"]
    samples = method.fixed_samples or settings.test_samples
    began = time.process_time()
    test = method.sample(data, samples=samples)
    seconds = time.process_time() - began
    unseen = sets["out_of_distribution"]
    outside = method.sample(unseen, samples=samples)
    factor = fitted["spread_factor"] if fitted else 1.0
    result: dict[str, Any] = {
        "samples": samples,
        "spread_factor": factor,
        "test": judge(test.scaled(factor), data),
        "test_as_trained": judge(test, data),
        "out_of_distribution": judge_finite(outside.scaled(factor), unseen),
        "out_of_distribution_as_trained": judge_finite(outside, unseen),
        "equivariance_error": equivariance_error(method, data.part(0, 100)),
        "prediction": {"seconds": seconds, "passes": samples * len(data)},
    }
    if samples > 3:
        result["test_three_samples"] = judge(test.scaled(factor).subset(3), data)
    if method.fixed_samples is None:
        with torch.no_grad():
            point = method.run(data, [None]).flatten(1, 2)
        result["test_at_zero_noise"] = judge(Samples({"positions": point}, test.system), data)
    return result


def _make(name: str, recipe: Recipe) -> Method:
    return TRAINED[name.partition("+")[0]](EGNNConfig(**recipe.network), **recipe.options)


def equivariance_error(method: Method, data: Trajectories) -> dict[str, float]:
    """RMS distance between the sample of a rotated (relabelled) system and the rotated (relabelled) sample."""
    count = method.fixed_samples or 4
    particles = data.positions.shape[1]
    # an arbitrary orthogonal matrix and permutation
    matrix = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
    order = torch.randperm(particles, generator=torch.Generator().manual_seed(0))

    def positions(given: Trajectories) -> torch.Tensor:
        return method.sample(given, samples=count).positions.unflatten(1, (-1, particles))

    expected = positions(data)
    rotated = positions(replace(data, positions=data.positions @ matrix.T, velocities=data.velocities @ matrix.T))
    relabelled = positions(Trajectories(*(values[:, order] for values in vars(data).values())))
    errors = {"rotation": rotated - expected @ matrix.T, "relabelling": relabelled - expected[:, :, order]}
    return {name: float(error.square().mean().sqrt()) for name, error in errors.items()}


def judge(samples: Samples, data: Trajectories) -> dict[str, float]:
    """MSE of the sample mean, fair CRPS and, for more than one sample, spread-skill ratio; in natural units."""
    target = data.target.flatten(0, 1)
    mean = samples.mean.positions
    scores = {
        "mse": float((mean - target).square().mean()),
        "crps": float(fair_crps(samples.positions, target).mean()),
    }
    if samples.count > 1:
        scores["ssr"] = metrics.spread_skill_ratio(mean, samples.spread.positions, target, samples.count)
    return scores


def judge_finite(samples: Samples, data: Trajectories) -> dict[str, float]:
    """The scores of `judge` without trajectories that have a non-finite sample, and how many were left out."""
    particles = data.positions.shape[1]
    finite = samples.positions.isfinite().all(-1).all(0).view(-1, particles).all(1)
    lost = len(data) - int(finite.sum())
    if not lost:
        return judge(samples, data)
    kept = finite.repeat_interleave(particles)
    some = Samples({"positions": samples.positions[:, kept]}, samples.system[: int(kept.sum())])
    return {**judge(some, data.select(finite)), "lost_trajectories": lost}


def _training_set(data: Trajectories, settings: NBodySettings) -> Trajectories:
    return data.with_reversed() if settings.time_reversal else data


def _load(split: str, settings: NBodySettings) -> Trajectories:
    loaded = nbody_data.load(split, settings.data)
    _, (start, end), _ = settings.data.split(split)
    return loaded.at_rest((end - start) * TIME_STEP) if settings.at_rest else loaded


def _weights(cell: Cell, folder: Path) -> Path:
    return folder / "weights" / f"{cell.name}.pt"


def _read_weights(file: Path) -> dict[str, Any]:
    """The weights and the training record in a file."""
    try:
        record: dict[str, Any] = read_tensors(file)
        check_sum(file, record, required=False)  # files from before format 6 of checkpoints have none
        kinds = {"settings": Mapping[str, Any], "training": Mapping[str, Any], "state": Mapping[str, torch.Tensor]}
        for name, kind in kinds.items():
            check_type(record[name], kind, name)
        return {name: value for name, value in record.items() if name != CHECKSUM}
    except (CheckpointError, *DAMAGES):
        raise ValueError(f"{file} is damaged; delete it to train it again") from None


def _load_trained(cell: Cell, preset: Preset, folder: Path) -> tuple[Method, dict[str, Any]]:
    """The stored method of a cell, and its training record."""
    file = _weights(cell, folder)
    if not file.exists():
        raise FileNotFoundError(
            f"an ensemble needs the weights {file}, which exist only on the machine that trained them; delete "
            f"{cell.file(folder)} if it exists, then run method {cell.method} with size {cell.size}"
        )
    method = _make(cell.method, preset.recipes[cell.method])
    record = _read_weights(file)
    if _completed(record["settings"]) != _described(cell, preset, None):
        raise ValueError(f"{file} was trained with other settings; delete it and {cell.file(folder)} to train it again")
    try:
        method.load_state_dict(record.pop("state"))
    except DAMAGES as error:
        raise ValueError(f"{file} is damaged: {first_reason(error)}; delete it to train it again") from error
    return method, record
