"""The paper's second benchmark: a pretrained potential fine-tuned on silica by every method; Table 2 and Figure 2."""

import json
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ase import Atoms
from rich.console import Console

from pmlip import datasets, methods
from pmlip.backbones import load_backbone
from pmlip.benchmark.publish import Results, check_installed, empty_figure, over_seeds, publish
from pmlip.benchmark.record import environment, slug
from pmlip.benchmark.runner import Cell, read_cells, run_cells, run_rounds
from pmlip.evaluation import Evaluation, compare, evaluate
from pmlip.methods import Method
from pmlip.methods.ensemble import Ensemble
from pmlip.model import load
from pmlip.structures import fingerprint, require_labels
from pmlip.training import FinetuneConfig, finetune

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHIPPED = "silica-pbe"

# "method+variant" is the same method fine-tuned otherwise. BLIP's published schedule counts steps but is advanced once
# per epoch, so its rates rise until the end.
VARIANTS: dict[str, dict[str, Any]] = {
    "blip+published": {
        "backbone_rate": 1e-5,
        "noise_rate": 1e-4,
        "batch": 8,
        "steps": None,
        "epochs": 50,
        "clip": 0.5,
        "warm_up": 1.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class SilicaSettings:
    backbone: str
    data: str  # silica-pbe, a file of structures, or name:file of pmlip.datasets
    test_data: str | None = None  # a file of its own to test on; otherwise the test set is taken from the data first
    unseen: tuple[str, ...] = ()  # files of other structures; silica-pbe has its own
    weights: str | None = None  # local file of the backbone's weights
    trust: bool = False  # load weights that are a pickle
    test: int = 400
    valid_share: float = 0.25  # of the training structures, as many again to validate on; at least 8, if there are
    test_unseen: int = 100  # structures of each unseen file
    test_samples: int = 32
    config: FinetuneConfig = field(default_factory=FinetuneConfig)


def run(
    settings: SilicaSettings,
    *,
    names: Sequence[str],
    sizes: Sequence[int],
    seeds: int,
    folder: Path,
    jobs: int,
    console: Console,
) -> None:
    """Run the cells that are not finished, then write the table and the figure of all that are."""
    check_installed()
    for name in names:
        methods.check(name.partition("+")[0])
        if "+" in name and name not in VARIANTS:
            raise ValueError(f"unknown variant {name!r}; allowed: {', '.join(VARIANTS)}")
    # before anything is computed: are there enough structures, do they carry labels, can the backbone be had?
    hashes = {}
    for size in sizes:
        data = splits(size, settings)
        require_labels(data.everything, ("energy", "forces"))
        hashes[size] = fingerprint(data.everything)[:16]
    load_backbone(settings.backbone, weights=settings.weights, trust=settings.trust)
    prefix = f"{slug(settings.backbone)}-{slug(_stem(settings.data))}"
    cells = [Cell(f"{prefix}-{name}", size, seed) for size in sizes for name in names for seed in range(seeds)]
    composed = [cell for cell in cells if made_of(cell)]
    needed = [part for cell in composed for part in made_of(cell)]
    trained = list(dict.fromkeys([cell for cell in cells if not made_of(cell)] + needed))
    for cell, result in read_cells(folder).items():
        if cell in (*trained, *composed) and result["settings"] != _described(settings, cell, hashes[cell.size]):
            raise ValueError(f"{cell.file(folder)} was made with other settings; give another folder with --out")
    job = partial(work, settings=settings, folder=folder)
    try:
        run_rounds([trained, composed], lambda part: run_cells(part, job, folder, jobs=jobs, console=console))
    finally:  # also when a cell failed: what is finished is worth a table
        publish(folder, table=table, summary=summary, figure=figure, console=console)


def _file(given: str) -> Path:
    """The file of "file" or "name:file"."""
    return Path(given.rpartition(":")[2])


def _stem(given: str) -> str:
    return _file(given).stem


def _without_folder(given: str) -> str:
    """The same without the folder of the file; how it is read ("name:") belongs to the settings."""
    reader, colon, _ = given.rpartition(":")
    return f"{reader}{colon}{_file(given).name}"


def _method(cell: Cell) -> str:
    return cell.method.split("-", 2)[2]


def made_of(cell: Cell) -> list[Cell]:
    """The deterministic fine-tunings that a cell is made of, for the methods that need no training of their own."""
    name = _method(cell)
    plain = replace(cell, method=cell.method.removesuffix(name) + "deterministic")
    if name in ("constant", "force-scaled"):
        return [plain]
    if name == "ensemble":  # as in the paper: of four seeds all but its own
        first = cell.seed - cell.seed % 4
        return [replace(plain, seed=seed) for seed in range(first, first + 4) if seed != cell.seed]
    return []


def _config(settings: SilicaSettings, cell: Cell) -> FinetuneConfig:
    return replace(settings.config, **VARIANTS.get(_method(cell), {}))


def _described(settings: SilicaSettings, cell: Cell, structures: str) -> dict[str, Any]:
    """The settings as a result file holds them: of files their names, which are the same on every machine.

    structures: the hash of all structures of the cell, since files of one name can differ.
    """
    content = asdict(replace(settings, config=_config(settings, cell)))
    content["data"] = _without_folder(settings.data)
    content["test_data"] = _without_folder(settings.test_data) if settings.test_data else None
    content["unseen"] = [_without_folder(file) for file in settings.unseen]
    content["weights"] = Path(settings.weights).name if settings.weights else None
    read_back: dict[str, Any] = json.loads(json.dumps(content | {"structures": structures}))
    return read_back


@dataclass(frozen=True)
class Splits:
    train: list[Atoms]
    valid: list[Atoms]
    test: list[Atoms]
    unseen: dict[str, list[Atoms]]

    @property
    def everything(self) -> list[Atoms]:
        parts = (self.train, self.valid, self.test, *self.unseen.values())
        return [atoms for part in parts for atoms in part]


def splits(size: int, settings: SilicaSettings) -> Splits:
    """The structures of a cell; the same for all seeds, and a smaller training set is the beginning of a larger one."""
    wanted = max(8, round(settings.valid_share * size))
    if settings.data == SHIPPED:
        if settings.test_data or settings.unseen:
            raise ValueError(f"{SHIPPED} has test and unseen sets of its own; give others together with other --data")
        train, valid, test = (datasets.silica_pbe(part) for part in ("train", "valid", "test"))
        _check_enough(size, len(train), settings)
        unseen = {part: datasets.silica_pbe(part) for part in datasets.UNSEEN_SILICA_PBE}
        return Splits(train[:size], valid[:wanted], test, unseen)
    unseen = {_stem(file): _some(datasets.read_set(file), settings.test_unseen) for file in settings.unseen}
    if len(unseen) < len(settings.unseen):
        raise ValueError(f"files of unseen structures must have different names, got {', '.join(settings.unseen)}")
    structures = datasets.read_set(settings.data)
    if settings.test_data is not None:
        # as in the paper: training from the front of the file, validation from its end
        _check_enough(size + 1, len(structures), settings)
        rest = structures[size:]
        return Splits(structures[:size], rest[::-1][:wanted], datasets.read_set(settings.test_data), unseen)
    _check_enough(settings.test + size + wanted, len(structures), settings)
    mixed = _some(structures, len(structures))
    rest = mixed[settings.test :]
    return Splits(rest[:size], rest[::-1][:wanted], mixed[: settings.test], unseen)


def _some(structures: Sequence[Atoms], count: int) -> list[Atoms]:
    """So many of them by chance, always the same."""
    return [structures[i] for i in np.random.default_rng(0).permutation(len(structures))[:count]]


def _check_enough(needed: int, held: int, settings: SilicaSettings) -> None:
    if needed > held:
        raise ValueError(
            f"{needed} structures in all were asked for, with those to validate and test on, but {settings.data} holds "
            f"{held}"
        )


def work(cell: Cell, *, settings: SilicaSettings, folder: Path) -> dict[str, Any]:
    """Fine-tune one method, or put it together from what is fine-tuned, and judge it."""
    data = splits(cell.size, settings)
    if parts := made_of(cell):
        plain = [_fine_tuned(part, data, settings, folder) for part in parts]
        model, training = (
            _put_together(_method(cell), plain, data),
            _summed([part.record["training"] for part in plain]),
        )
    else:
        model = _fine_tuned(cell, data, settings, folder)
        training = model.record["training"]
    inside = evaluate(model, data.test, samples=settings.test_samples)
    result: dict[str, Any] = {
        "cell": {
            "backbone": settings.backbone,
            "data": _stem(settings.data),
            "method": _method(cell),
            "size": cell.size,
        }
        | {"seed": cell.seed},
        "samples": inside.samples,
        "test": _flat(inside),
        "all_scores": inside.scores,
        "unseen": {},
        "training": training,
        "prediction": {"seconds": round(inside.seconds, 1), "passes": inside.samples * inside.structures},
    }
    for place, structures in data.unseen.items():
        outside = evaluate(model, structures, samples=settings.test_samples)
        result["unseen"][place] = _flat(outside) | (compare(inside, outside) if inside.spread.any() else {})
    return {**result, "settings": _described(settings, cell, fingerprint(data.everything)[:16]), **environment()}


def _fine_tuned(cell: Cell, data: Splits, settings: SilicaSettings, folder: Path) -> Method:
    """The method of a cell, fine-tuned; its record tells the cost. Kept in a file, for others that are made of it."""
    file = folder / "weights" / f"{cell.name}.pt"
    described = _described(settings, cell, fingerprint(data.everything)[:16])
    backbone = load_backbone(settings.backbone, weights=settings.weights, trust=settings.trust)
    if file.exists():
        stored: Method = load(file, backbone=backbone)
        if stored.record["settings"] == described:
            return stored
    torch.manual_seed(cell.seed)  # of what a method adds to the backbone
    model = methods.make(_method(cell).partition("+")[0], backbone)
    config = replace(_config(settings, cell), seed=cell.seed)
    unfinished = file.with_suffix("")
    done = finetune(model, data.train, valid=data.valid, config=config, folder=unfinished)
    passes = done.steps * config.batch * (config.samples if model.trains_on_samples else 1)
    model.record = {
        "training": {
            "steps": done.steps,
            "structures": done.steps * config.batch,
            "passes": passes,
            "seconds": round(done.seconds, 1),
            "error_before": done.scales,
            "noise_rate": done.noise_rate,
            "validation_curve": [line for line in done.log if "valid" in line],
        },
        "settings": described,
    }
    model.save(file)
    shutil.rmtree(unfinished)
    return model


def _put_together(name: str, plain: Sequence[Method], data: Splits) -> Method:
    """A method without training of its own, from potentials that are fine-tuned."""
    if name == "ensemble":
        return Ensemble.of(plain)
    model = methods.make(name, plain[0].backbone)
    model.finish(data.valid)
    return model


def _summed(costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several fine-tunings cost together; all else is that of the first."""
    return costs[0] | {key: sum(cost[key] for cost in costs) for key in ("steps", "structures", "passes", "seconds")}


def _flat(evaluation: Evaluation) -> dict[str, float]:
    """The scores of the benchmark's tables, in eV and Å."""
    forces, energy = evaluation.scores["forces"], evaluation.scores["energy"]
    wanted = {
        "force_mae": forces["mae"],
        "force_mae_without_noise": forces["mae_without_noise"],
        "force_crps": forces["crps"],
        "energy_mae": energy["mae"],
        "energy_mae_without_noise": energy["mae_without_noise"],
        "energy_crps": energy["crps"],
    }
    renamed = {
        "ssr": "ssr",
        "spread": "force_spread",
        "spearman_structure": "spearman",
        "spearman_structure_of_force": "spearman_of_force",
        "spearman_structure_given_force": "spearman_given_force",
        "spearman_atom": "spearman_atom",
        "spearman_atom_of_force": "spearman_atom_of_force",
        "spearman_atom_given_force": "spearman_atom_given_force",
    }
    wanted |= {new: forces[old] for old, new in renamed.items() if old in forces}
    if "ssr" in energy:
        wanted["energy_ssr"] = energy["ssr"]
    return wanted


COLUMNS = {  # name -> title, scale and digits
    "force_mae": ("F-MAE", 1e3, 1),
    "force_mae_without_noise": ("z = 0", 1e3, 1),
    "force_crps": ("F-CRPS", 1e3, 1),
    "ssr": ("SSR", 1, 2),
    "spearman": ("Spearman", 1, 2),
    "spearman_of_force": ("of the force", 1, 2),
    "energy_crps": ("E-CRPS", 1e3, 2),
    "energy_ssr": ("E-SSR", 1, 2),
}


def summary(results: Results) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds for each backbone, data, size and method."""
    groups: dict[tuple[str, str, int, str], list[dict[str, Any]]] = {}
    for result in results.values():
        cell = result["cell"]
        groups.setdefault((cell["backbone"], cell["data"], cell["size"], cell["method"]), []).append(result)
    rows = []
    for (backbone, data, size, method), found in sorted(groups.items()):
        row: dict[str, Any] = {"backbone": backbone, "data": data, "size": size, "method": method, "seeds": len(found)}
        row["samples"] = found[0]["samples"]
        for name in COLUMNS:
            values = [result["test"][name] for result in found if name in result["test"]]
            if values:
                row[name] = over_seeds(values)
        for place in found[0]["unseen"]:
            scores = [result["unseen"][place] for result in found]
            row[f"unseen {place}"] = {
                name: statistics.mean(score[name] for score in scores)
                for name in ("force_mae", "force_crps", "auroc_spread", "error_ratio", "spread_ratio")
                if name in scores[0]
            }
        for part in ("training", "prediction"):
            row[f"{part}_seconds"] = statistics.mean(result[part]["seconds"] for result in found)
            row[f"{part}_passes"] = statistics.mean(result[part]["passes"] for result in found)
        rows.append(row)
    return rows


def table(results: Results) -> str:
    """Table 2 as Markdown: forces in meV/Å, energies in meV/atom."""
    titles = [title for title, _, _ in COLUMNS.values()]
    heading = [
        "backbone",
        "data",
        "n",
        "method",
        "K",
        *titles,
        "unseen: AUROC, error x, spread x",
        "training: passes, s",
    ]
    lines = [f"| {' | '.join([*heading, 'seeds'])} |", "|---" * (len(heading) + 1) + "|"]
    for row in summary(results):
        cells = []
        for name, (_, scale, digits) in COLUMNS.items():
            value = row.get(name)
            spread = "" if value is None or row["seeds"] == 1 else f" ± {scale * value['std']:.{digits}f}"
            cells.append("" if value is None else f"{scale * value['mean']:.{digits}f}{spread}")
        unseen = "; ".join(
            f"{key.removeprefix('unseen ')} {v['auroc_spread']:.2f}, {v['error_ratio']:.2f}, {v['spread_ratio']:.2f}"
            for key, v in row.items()
            if key.startswith("unseen ") and "auroc_spread" in v
        )
        cost = f"{row['training_passes']:.1e}, {row['training_seconds']:.0f}"
        fixed = [row["backbone"], row["data"], row["size"], row["method"], row["samples"]]
        lines.append(f"| {' | '.join(map(str, [*fixed, *cells, unseen, cost, row['seeds']]))} |")
    return "\n".join(lines) + "\n"


def figure(results: Results) -> "Figure":
    """Figure 2: accuracy, score, calibration and ranking against the size of the training set, a row per data set."""
    rows = summary(results)
    places = sorted({(row["backbone"], row["data"]) for row in rows})
    shown = ("force_mae", "force_crps", "ssr", "spearman")
    picture = empty_figure(3.4 * len(shown), 3.2 * len(places))
    for line, place in enumerate(places):
        for column, name in enumerate(shown):
            title, scale, _ = COLUMNS[name]
            axes = picture.add_subplot(len(places), len(shown), len(shown) * line + column + 1)
            for number, method in enumerate([*methods.available(), *VARIANTS]):
                of_method = [r for r in rows if (r["backbone"], r["data"], r["method"]) == (*place, method)]
                found = [row for row in of_method if name in row]
                if found:
                    mean, std = ([scale * row[name][part] for row in found] for part in ("mean", "std"))
                    sizes = [row["size"] for row in found]
                    axes.errorbar(sizes, mean, yerr=std, fmt="o-", color=f"C{number}", label=method, capsize=3)
            if name == "ssr":
                axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
            axes.set(xscale="log", xlabel="training structures", title=title + (", meV/Å" if scale > 1 else ""))
            if column == 0:
                axes.set_ylabel(" on ".join(place))
            if column == 1:
                axes.legend(fontsize=7)
    return picture
