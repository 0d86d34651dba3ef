"""The paper's first benchmark: cells, Table 1 and Figure 1."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from pmlip import metrics
from pmlip.benchmark.publish import Results, empty_figure, over_seeds, publish
from pmlip.benchmark.record import environment
from pmlip.benchmark.runner import Cell, read_cells, run_cells
from pmlip.calibration import best_factor
from pmlip.files import atomic_write
from pmlip.hints import did_you_mean
from pmlip.nbody import data as nbody_data
from pmlip.nbody.data import NBodyConfig, Trajectories
from pmlip.nbody.egnn import EGNNConfig
from pmlip.nbody.methods import BLIP, PBLIP, PEGNN, Deterministic, MCDropout, Method, leave_one_out
from pmlip.nbody.training import DivergedError, Recipe, train
from pmlip.samples import Samples
from pmlip.scores import fair_crps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Methods that are trained. An ensemble is put together from EGNNs.
TRAINED: dict[str, Callable[..., Method]] = {
    "egnn": Deterministic,
    "blip": BLIP,
    "mc-dropout": MCDropout,
    "p-egnn": PEGNN,
    "p-blip": PBLIP,
}
METHODS = ("egnn", "ensemble", *(name for name in TRAINED if name != "egnn"))  # in the order of the table
ELAPSED = 1.0  # time between input and target
WATCHED = 10  # samples when a method is judged on its way; the fair CRPS is unbiased at any number


@dataclass(frozen=True, kw_only=True)
class NBodySettings:
    data: NBodyConfig = field(default_factory=NBodyConfig)
    test_samples: int = 100
    validation_samples: int = 50
    at_rest: bool = True  # work in the frame of the centre of mass, all methods alike
    time_reversal: bool = True  # train on the reversed trajectories too, all methods alike


# A method is trained by its recipe; "method+variant" names the same method with another one. The best of 19 trials each
# on validation data at n = 1000 (docs/nbody.md).
_COMMON: dict[str, Any] = {"shrink": 0.2, "patience": 3}
RECIPES: dict[str, Recipe] = {
    "egnn": Recipe(epochs=300, learning_rate=8e-3, **_COMMON),
    "blip": Recipe(epochs=300, options={"beta": 1e-3}, **_COMMON),
    "mc-dropout": Recipe(epochs=300, **_COMMON),
    "p-egnn": Recipe(learning_rate=4e-3, weight_decay=0.03, **_COMMON),
    "p-blip": Recipe(learning_rate=4e-3, weight_decay=0.03, options={"beta": 1e-3}, **_COMMON),  # as both of its parts
}


@dataclass(frozen=True)
class Preset:
    settings: NBodySettings
    recipes: dict[str, Recipe]
    validation_only: bool = False  # for tuning, which must not see the test data


PRESETS = {
    "quick": Preset(
        NBodySettings(
            data=NBodyConfig(train=400, valid=100, test=200, out_of_distribution=100),
            test_samples=20,
            validation_samples=10,
        ),
        {name: replace(recipe, epochs=3, shrink=0.0) for name, recipe in RECIPES.items()},
    ),
    "full": Preset(NBodySettings(), RECIPES),
}

# The paper: mean and standard deviation of MSE x 1e3, CRPS x 1e2, SSR on its own test set.
PAPER: dict[tuple[str, int], tuple[tuple[float, float] | None, ...]] = {
    ("egnn", 3000): ((6.83, 0.31), None, None),
    ("ensemble", 3000): ((5.84, 0.13), (1.88, 0.10), (0.58, 0.02)),
    ("blip", 1000): ((7.39, 0.75), (2.86, 0.37), (0.40, 0.04)),
    ("blip", 3000): ((6.13, 0.75), (2.35, 0.12), (0.42, 0.03)),
    ("blip", 10000): ((4.57, 0.41), (2.00, 0.19), (0.42, 0.02)),
    ("p-egnn", 1000): ((7.89, 0.60), (2.31, 0.16), (0.75, 0.08)),
    ("p-egnn", 3000): ((6.09, 0.38), (1.76, 0.08), (0.83, 0.12)),
    ("p-egnn", 10000): ((4.19, 0.17), (1.36, 0.07), (0.88, 0.05)),
}
SCALES = {"mse": 1e3, "crps": 1e2, "ssr": 1.0}


def run(
    *,
    methods: Sequence[str],
    sizes: Sequence[int],
    seeds: int,
    preset: Preset,
    folder: Path,
    jobs: int,
    console: Console,
) -> None:
    """Run the cells that are not finished, then write the table and the figure of all that are."""
    for method in methods:
        if method not in METHODS:
            hint = did_you_mean(method, METHODS)
            raise ValueError(f"unknown method {method!r}; allowed: {', '.join(METHODS)}{hint}")
    if "ensemble" in methods and seeds < 3:
        raise ValueError(f"an ensemble leaves one of the EGNN seeds out and needs at least 3, got seeds={seeds}")
    # An ensemble is made of the EGNNs, so those come first.
    for round_of in ([m for m in methods if m != "ensemble"], [m for m in methods if m == "ensemble"]):
        cells = [Cell(method, size, seed) for size in sizes for method in round_of for seed in range(seeds)]
        run_checked(cells, preset, folder, seeds=seeds, jobs=jobs, console=console)
    publish(folder, table=table, summary=summary, figure=figure, console=console)


def run_checked(
    cells: Sequence[Cell], preset: Preset, folder: Path, *, seeds: int, jobs: int, console: Console
) -> None:
    """Run these cells; a folder holds cells of one setting only, and the data are there before the jobs start."""
    held = preset.settings.data.train
    for cell in cells:
        if cell.size > held:
            raise ValueError(f"a training set of {cell.size} was asked for, but the data hold {held}")
    for cell, result in read_cells(folder).items():
        if result["settings"] != _described(cell, preset):
            raise ValueError(f"{cell.file(folder)} was made with other settings; give another folder with --out")
    for split in nbody_data.SPLITS:
        nbody_data.load(split, preset.settings.data)
    run_cells(cells, partial(work, preset=preset, folder=folder, seeds=seeds), folder, jobs=jobs, console=console)


def _described(cell: Cell, preset: Preset) -> dict[str, Any]:
    """The settings of a cell as its result file holds them."""
    recipe = preset.recipes.get("egnn" if cell.method == "ensemble" else cell.method)
    described = {**asdict(preset.settings), "recipe": asdict(recipe) if recipe else None}
    read_back: dict[str, Any] = json.loads(json.dumps(described))  # lists for tuples
    return read_back


def work(cell: Cell, *, preset: Preset, folder: Path, seeds: int) -> dict[str, Any]:
    """Train (or, for an ensemble, put together) one method and judge it."""
    settings = preset.settings
    sets = {split: _load(split, settings) for split in nbody_data.SPLITS}
    curve: list[dict[str, float]] = []
    weights = folder / "weights"
    if cell.method == "ensemble":
        members = [_load_egnn(weights, cell.size, seed, preset) for seed in range(seeds)]
        method: Method = leave_one_out(members)[cell.seed]
        cells = read_cells(folder)
        costs = [cells[Cell("egnn", cell.size, seed)]["training"] for seed in range(seeds) if seed != cell.seed]
        training = {key: sum(cost[key] for cost in costs) for key in ("seconds", "passes")}
    else:
        torch.manual_seed(cell.seed)
        recipe = preset.recipes[cell.method]
        method = _make(cell.method, recipe)
        watched = method.fixed_samples or min(WATCHED, settings.validation_samples)
        try:
            done = train(
                method,
                _training_set(sets["train"].first(cell.size), settings),
                recipe,
                epochs=recipe.epochs_for(cell.size),
                seed=cell.seed,
                watch=lambda m: judge(m.sample(sets["valid"], samples=watched), sets["valid"]),
            )
        except DivergedError as error:
            if not preset.validation_only:
                raise
            described = {"settings": _described(cell, preset), **environment("numba")}
            return {"cell": asdict(cell), "diverged": str(error), "validation_curve": [], **described}
        method, curve = done.method, done.curve
        training = {"seconds": done.seconds, "passes": done.passes}
        weights.mkdir(parents=True, exist_ok=True)
        with atomic_write(weights / f"{cell.name}.pt") as file:
            torch.save(method.state_dict(), file)
    factor = _spread_factor(method, sets["valid"], settings)
    return {
        "cell": asdict(cell),
        **({} if preset.validation_only else _tests(method, sets, settings, factor)),
        "validation_curve": curve,
        "validation_scaled": factor,
        "training": training,
        "settings": _described(cell, preset),
        **environment("numba"),
    }


def _spread_factor(method: Method, valid: Trajectories, settings: NBodySettings) -> dict[str, float] | None:
    """The factor for the spread that fits the validation data best, and the scores with it.

    None where the number of samples is fixed: about the mean of three samples, say, scores could not be trusted.
    """
    if method.fixed_samples is not None or settings.validation_samples < 3:
        return None
    drawn = method.sample(valid, samples=settings.validation_samples)
    factor = best_factor(drawn.positions, valid.target.flatten(0, 1))
    scores = judge(_scaled(drawn, factor), valid)
    return {"spread_factor": factor, **scores}


def _scaled(samples: Samples, factor: float) -> Samples:
    mean = samples.positions.mean(0)
    return Samples({"positions": mean + factor * (samples.positions - mean)}, samples.system)


def _tests(
    method: Method, sets: dict[str, Trajectories], settings: NBodySettings, fitted: dict[str, float] | None
) -> dict[str, Any]:
    """Scores on the test data: of K samples, of three of them, of the prediction without noise; and their cost.

    "as trained" or with the spread scaled by the factor that fits the validation data best, for all methods alike but
    ensembles, whose few samples do not allow it.
    """
    data = sets["test"]
    samples = method.fixed_samples or settings.test_samples
    began = time.perf_counter()
    test = method.sample(data, samples=samples)
    seconds = time.perf_counter() - began
    unseen = sets["out_of_distribution"]
    outside = method.sample(unseen, samples=samples)
    factor = fitted["spread_factor"] if fitted else 1.0
    result: dict[str, Any] = {
        "samples": samples,
        "spread_factor": factor,
        "test": judge(_scaled(test, factor), data),
        "test_as_trained": judge(test, data),
        "out_of_distribution": judge(_scaled(outside, factor), unseen),
        "out_of_distribution_as_trained": judge(outside, unseen),
        "equivariance_error": equivariance_error(method, data.part(0, 100)),
        "prediction": {"seconds": seconds, "passes": samples * len(data)},
    }
    if samples > 3:
        result["test_three_samples"] = judge(_scaled(test, factor).subset(3), data)
    if method.fixed_samples is None:
        with torch.no_grad():
            point = method.run(data, [None]).flatten(1, 2)
        result["test_at_zero_noise"] = judge(Samples({"positions": point}, test.system), data)
    return result


def _make(name: str, recipe: Recipe) -> Method:
    return TRAINED[name.partition("+")[0]](EGNNConfig(**recipe.network), **recipe.options)


def equivariance_error(method: Method, data: Trajectories) -> dict[str, float]:
    """How far a sample of the turned (relabelled) system is from the turned (relabelled) sample, root mean square."""
    count = method.fixed_samples or 4
    particles = data.positions.shape[1]
    # any rotation and any order will do
    matrix = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
    order = torch.randperm(particles, generator=torch.Generator().manual_seed(0))

    def positions(given: Trajectories) -> torch.Tensor:
        return method.sample(given, samples=count).positions.unflatten(1, (-1, particles))

    expected = positions(data)
    turned = positions(replace(data, positions=data.positions @ matrix.T, velocities=data.velocities @ matrix.T))
    relabelled = positions(Trajectories(*(values[:, order] for values in vars(data).values())))
    errors = {"rotation": turned - expected @ matrix.T, "relabelling": relabelled - expected[:, :, order]}
    return {name: float(error.square().mean().sqrt()) for name, error in errors.items()}


def judge(samples: Samples, data: Trajectories) -> dict[str, float]:
    """MSE of the sample mean, CRPS and spread-skill ratio, in natural units; with one sample there is no spread."""
    target = data.target.flatten(0, 1)
    mean = samples.mean.positions
    scores = {
        "mse": float((mean - target).square().mean()),
        "crps": float(fair_crps(samples.positions, target).mean()),
    }
    if samples.count > 1:
        scores["ssr"] = metrics.spread_skill_ratio(mean, samples.spread.positions, target, samples.count)
    return scores


def _training_set(data: Trajectories, settings: NBodySettings) -> Trajectories:
    return data.with_reversed() if settings.time_reversal else data


def _load(split: str, settings: NBodySettings) -> Trajectories:
    loaded = nbody_data.load(split, settings.data)
    return loaded.at_rest(ELAPSED) if settings.at_rest else loaded


def _load_egnn(weights: Path, size: int, seed: int, preset: Preset) -> Method:
    file = weights / f"egnn-{size}-{seed}.pt"
    if not file.exists():
        raise FileNotFoundError(f"an ensemble needs the trained EGNN {file}; run the method egnn for this size first")
    method = _make("egnn", preset.recipes["egnn"])
    method.load_state_dict(torch.load(file, weights_only=True))
    return method


def summary(results: Results) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds for each method and size, beside the paper's."""
    rows = []
    for method, size in sorted(
        {(cell.method, cell.size) for cell in results}, key=lambda k: (k[1], METHODS.index(k[0]))
    ):
        found = [result for cell, result in results.items() if (cell.method, cell.size) == (method, size)]
        row: dict[str, Any] = {"method": method, "size": size, "seeds": len(found), "samples": found[0]["samples"]}
        for position, name in enumerate(SCALES):
            for key, place in ((name, "test"), (f"{name}_as_trained", "test_as_trained")):
                values = [result[place][name] for result in found if name in result[place]]
                if values:
                    row[key] = over_seeds(values)
            published = PAPER.get((method, size), (None, None, None))[position]
            if published is not None:
                row[f"paper_{name}"] = {
                    key: value / SCALES[name] for key, value in zip(("mean", "std"), published, strict=True)
                }
        row["training_passes"] = statistics.mean(result["training"]["passes"] for result in found)
        row["training_seconds"] = statistics.mean(result["training"]["seconds"] for result in found)
        rows.append(row)
    return rows


def table(results: Results) -> str:
    """Table 1 as Markdown."""
    lines = [
        "| n | method | K | MSE x 1e3 | paper | CRPS x 1e2 | as trained | paper | SSR | as trained | paper "
        "| training: passes, seconds | seeds |",
        "|---" * 13 + "|",
    ]

    def cell(row: dict[str, Any], name: str, key: str) -> str:
        value = row.get(key)
        return "" if value is None else f"{SCALES[name] * value['mean']:.2f} ± {SCALES[name] * value['std']:.2f}"

    for row in summary(results):
        columns = [(name, key) for name in SCALES for key in (name, f"{name}_as_trained", f"paper_{name}")]
        scores = [cell(row, name, key) for name, key in columns if key != "mse_as_trained"]  # the mean stays
        cost = f"{row['training_passes']:.1e}, {row['training_seconds']:.0f}"
        lines.append(
            f"| {row['size']} | {row['method']} | {row['samples']} | {' | '.join(scores)} | {cost} | {row['seeds']} |"
        )
    return "\n".join(lines) + "\n"


def figure(results: Results) -> "Figure":
    """Figure 1: the three scores against the size of the training set, with the paper's values in dashes."""
    rows = summary(results)
    picture = empty_figure(11, 3.6)
    for position, (name, scale) in enumerate(SCALES.items()):
        axes = picture.add_subplot(1, 3, position + 1)
        for number, method in enumerate(METHODS):
            for key, style in ((name, "o-"), (f"paper_{name}", "s--")):
                found = [row for row in rows if row["method"] == method and key in row]
                if not found:
                    continue
                sizes = [row["size"] for row in found]
                mean, std = ([scale * row[key][part] for row in found] for part in ("mean", "std"))
                label = method if key == name else f"{method}, paper"
                axes.errorbar(sizes, mean, yerr=std, fmt=style, color=f"C{number}", label=label, capsize=3)
        if name == "ssr":
            axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set(
            xscale="log",
            xlabel="training trajectories",
            title={"mse": "MSE × 1e3", "crps": "CRPS × 1e2"}.get(name, "SSR"),
        )
        if position == 1:
            axes.legend(fontsize=8)
    return picture
