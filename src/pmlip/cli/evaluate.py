"""pmlip evaluate: the scores of a model and its uncertainty on structures with labels."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pmlip.atomic_files import write_json
from pmlip.cli.checks import check_folder, chosen, chosen_device, name_of_structure
from pmlip.cli.progress import counter, progress_bar
from pmlip.cli.score_table import comparison_line, score_table_of
from pmlip.evaluation import Evaluation, as_record, compare, evaluate
from pmlip.loading import load
from pmlip.methods import Method
from pmlip.provenance import as_record as as_record_of_model
from pmlip.provenance import environment
from pmlip.report import check_installed, write_report
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
    inside: dict[str, Evaluation] = {}  # by model
    outside: dict[str, Evaluation] = {}  # of the first model, by file
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
            console.print(score_table_of(f"{names[given]} on {called[file]}", result))
            if file is data:
                inside[names[given]] = result
            elif given is path:
                outside[called[file]] = result
            scored = as_record(result)
            first = inside[names[given]]
            if file is not data and first.spread.any() and all(np.isfinite(x.error).all() for x in (first, result)):
                scored["against"] = {called[data]: compare(first, result)}
                console.print(comparison_line(called[data], called[file], scored["against"][called[data]]))
            place = record if given is path else record.setdefault("compared", {}).setdefault(names[given], {})
            place[called[file]] = scored
    record |= environment()
    if out is not None:
        write_json(out, record)
    if report is not None:
        known = {name: record for name, record in made.items() if record}
        write_report(report, inside, data=called[data], unseen=outside, records=known)
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
