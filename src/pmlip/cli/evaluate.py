"""pmlip evaluate: the scores of a model and its uncertainty on structures with labels."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase.units import GPa
from rich.console import Console
from rich.table import Table

from pmlip.atomic_files import write_json
from pmlip.cli.checks import check_folder, chosen, chosen_device, name_of_structure
from pmlip.cli.progress import counter, progress_bar
from pmlip.evaluation import Evaluation, as_record, compare, evaluate
from pmlip.loading import load
from pmlip.methods import Method
from pmlip.provenance import as_record as as_record_of_model
from pmlip.provenance import environment
from pmlip.report import Judged, check_installed, write_report
from pmlip.structures.atoms import in_file
from pmlip.structures.files import read_structures
from pmlip.structures.labels import require_labels


def run(
    path: Path,
    data: Path,
    unseen: Sequence[Path],
    *,
    others: Sequence[Path],
    keys: Mapping[str, str | None],
    samples: int,
    seed: int,
    count: int | None,
    exclude: Path | None,
    weights: Path | None,
    trust: bool,
    device: str | None,
    out: Path | None,
    report: Path | None,
    console: Console,
) -> dict[str, Any]:
    if report is not None:
        check_installed()
    for file in (out, report):
        if file is not None:
            check_folder(file)
    names = _names([path, *others], [p.resolve().parent.name if p.stem == "model" else p.stem for p in (path, *others)])
    called = _names([data, *unseen], [file.name for file in (data, *unseen)])
    left_out = _excluded(exclude)
    structures, kept = {}, {}
    for file in (data, *unseen):
        read, found = read_structures(file, **keys)
        console.print(str(found))
        if report is not None:
            with in_file(file):
                require_labels(read, ["forces"])  # of every figure
        new = [i for i, atoms in enumerate(read) if not left_out or name_of_structure(atoms) not in left_out]
        if not new:
            raise ValueError(f"{file}: the run in {exclude} has seen every structure of it")
        if exclude is not None:
            console.print(f"left out, for the run in {exclude} has seen them: {len(read) - len(new)} of {len(read)}")
        structures[file], kept[file] = read, [new[i] for i in chosen(len(new), count, seed, file)]
    record: dict[str, Any] = {"model": path.name, "seed": seed}
    judged: list[Judged] = []
    outside: list[Judged] = []
    made = {}
    for given in (path, *others):
        loaded = _load(given, weights, trust=trust, device=chosen_device(device), several=bool(others))
        made[names[given]] = as_record_of_model(loaded.history, loaded.calibration)
        if report is not None:
            loaded.spread_samples(samples)  # refuses what gives no spread
        for file in (data, *unseen):
            with in_file(file):
                loaded.backbone.check(structures[file], kept[file])
            asked = [structures[file][i] for i in kept[file]]
            with progress_bar(console) as bar:
                show = counter(bar, f"{names[given]} on {called[file]}", len(asked))
                result = evaluate(loaded, asked, samples=samples, seed=seed, progress=show)
            console.print(_table(f"{names[given]} on {called[file]}", result))
            own = Judged(names[given], called[file], result)
            (judged if file is data else outside).append(own)
            scored = as_record(result)
            inside = judged[-1].evaluation
            if (
                file is not data
                and inside.spread.any()
                and all(np.isfinite(one.error).all() for one in (inside, result))
            ):
                against = compare(inside, result)
                scored["against"] = {called[data]: against}
                console.print(
                    f"{called[file]} against {called[data]}: error times {against['error_ratio']:.2f}, spread times "
                    f"{against['spread_ratio']:.2f}; AUROC of the spread {against['auroc_spread']:.2f}, of the "
                    f"force {against['auroc_force']:.2f}, of the error {against['auroc_error']:.2f}"
                )
            place = record if given is path else record.setdefault("compared", {}).setdefault(names[given], {})
            place[called[file]] = scored
    record |= environment()
    if out is not None:
        write_json(out, record)
    if report is not None:
        of_first = [own for own in outside if own.model == names[path]]
        write_report(report, judged, of_first, records={name: made[name] for name in made if made[name]})
        console.print(f"the report is {report}")
    return record


def _load(path: Path, weights: Path | None, *, trust: bool, device: str, several: bool) -> Method:
    """The model in a file; of several models, not all need the same weights, and those that ship with theirs none."""
    try:
        loaded: Method = load(path, weights=weights, trust=trust, device=device)
    except ValueError as error:
        if weights is None or not several:
            raise
        try:
            loaded = load(path, trust=trust, device=device)
        except (ValueError, OSError):
            raise error from None  # about the weights that were given
    return loaded


def _names(paths: Sequence[Path], short: Sequence[str]) -> dict[Path, str]:
    """What the files are called: their short name, and the whole path where two files share it."""
    named = dict(zip(paths, short, strict=True))
    taken = list(named.values())
    return {path: name if taken.count(name) == 1 else str(path) for path, name in named.items()}


def _excluded(folder: Path | None) -> set[str]:
    """Fingerprints of the structures that a run has seen."""
    if folder is None:
        return set()
    file = folder / "summary.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a finished run: it has no summary.json")
    summary = json.loads(file.read_text())
    if "seen" not in summary:
        raise ValueError(f"{file} was written by an older pmlip and does not say which structures the run has seen")
    return set(summary["seen"])


def _table(name: str, result: Evaluation) -> Table:
    table = Table(title=f"{name}: {result.structures} structures, K = {result.samples}, {result.seconds:.0f} s")
    for column in ("", "MAE", "without noise", "CRPS", "spread", "RMSE", "SSR", "in 95 %"):
        table.add_column(column, justify="right")
    units = {"energy": ("energy, meV/atom", 1e3), "forces": ("forces, meV/Å", 1e3), "stress": ("stress, GPa", 1 / GPa)}
    for output, values in result.scores.items():
        title, unit = units[output]
        scaled = [values.get(key) for key in ("mae_expected", "mae_without_noise", "crps", "spread", "rmse")]
        cells = ["" if value is None else f"{unit * value:.3g}" for value in scaled]
        ratios = [f"{values[key]:.2f}" if key in values else "" for key in ("ssr", "coverage_95")]
        table.add_row(title, *cells, *ratios)
    forces = result.scores.get("forces", {})
    ranking = [_ranked(forces, level) for level in ("structure", "atom") if f"spearman_{level}" in forces]
    if ranking:
        table.caption = f"Spearman of spread and error: {', '.join(ranking)}"
    return table


def _ranked(forces: Mapping[str, float], level: str) -> str:
    """How well the spread ranks structures or atoms, and beside it whatever else of that is known."""
    titles = {"at_best": "at best", "of_force": "|F| alone", "given_force": "beyond |F|"}
    known = {title: forces.get(f"spearman_{level}_{name}") for name, title in titles.items()}
    beside = ", ".join(f"{title} {value:.2f}" for title, value in known.items() if value is not None)
    return f"{level}s {forces[f'spearman_{level}']:.2f}{f' ({beside})' if beside else ''}"
