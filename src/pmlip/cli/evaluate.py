"""pmlip evaluate: the scores of a model and its uncertainty on structures with labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pmlip.cli.checks import check_output, chosen, chosen_device, name_of_structure
from pmlip.cli.options import (
    AsJson,
    Device,
    EnergyKey,
    ForcesKey,
    Model,
    SettingsFile,
    StressKey,
    Trust,
    Weights,
    print_json,
)
from pmlip.cli.progress import counter, progress_bar
from pmlip.run_folder import SUMMARY_FILE, model_file

COLOURS = {"good": "green", "fair": "yellow", "bad": "red"}

if TYPE_CHECKING:
    from ase import Atoms

    from pmlip.evaluation import Evaluation
    from pmlip.methods import Method


def evaluate(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Structures with DFT labels that the model was not trained on.")],
    *,
    samples: Annotated[
        int, typer.Option(min=1, help="Samples K per structure; more give more precise scores and cost more time.")
    ] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples and of the structures --count chooses.")] = 0,
    settings_file: SettingsFile = None,
    unseen: Annotated[
        list[Path] | None,
        typer.Option(
            help="Out-of-distribution structures with DFT labels, to see whether the spread rises on them; repeatable.",
            rich_help_panel="Data",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Use this many structures of each file, chosen at random; by default all.",
            rich_help_panel="Data",
        ),
    ] = None,
    exclude: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a finetune run; leave out the structures it used, if they are in DATA too.",
            rich_help_panel="Data",
        ),
    ] = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another model, to compare with on the same structures; repeatable.", rich_help_panel="Model"
        ),
    ] = None,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a report with figures to this HTML file.", rich_help_panel="Output")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the scores to this JSON file.", rich_help_panel="Output")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score the predictions and uncertainties of a model on structures with DFT labels.

    Example: pmlip evaluate p-chgnet/model.pt test.extxyz --samples 32 --report report.html
    """
    import numpy as np

    from pmlip import evaluation
    from pmlip.atomic_files import write_json
    from pmlip.cli.score_table import comparison_line, legend, score_table_of
    from pmlip.provenance import as_record, environment
    from pmlip.report import check_installed, write_report
    from pmlip.report.entry import Entry
    from pmlip.report.verdicts import energy_and_stress, headline
    from pmlip.structures.atoms import in_file
    from pmlip.structures.files import read_structures
    from pmlip.structures.labels import require_labels

    model, compare = model_file(model), [model_file(one) for one in compare or []]
    console = Console(quiet=as_json)
    models, files = [model, *compare], [data, *(unseen or [])]
    if report is not None:
        check_installed()
    inputs = [*models, *files, weights, settings_file, exclude / SUMMARY_FILE if exclude else None]
    for file in (out, report):
        if file is not None:
            check_output(file, inputs=inputs)
    if out is not None and report is not None and out.resolve() == report.resolve():
        raise ValueError(f"--out and --report are both {out}; give them different names")
    names = _names(models, [path.resolve().parent.name if path.stem == "model" else path.stem for path in models])
    called = _names(files, [file.name for file in files])
    left_out = _excluded(exclude)
    structures, kept = {}, {}
    for file in files:
        read, found = read_structures(file, energy_key=energy_key, forces_key=forces_key, stress_key=stress_key)
        console.print(str(found))
        if report is not None:
            with in_file(file):
                require_labels(read, ["forces"])  # every figure needs them
        new = [i for i, atoms in enumerate(read) if not left_out or name_of_structure(atoms) not in left_out]
        if not new:
            raise ValueError(f"{file}: the run in {exclude} used all of its structures, so none is left to evaluate")
        if exclude is not None:
            known = len(read) - len(new)
            console.print(f"{known} of {len(read)} structures were excluded because the run in {exclude} used them")
        else:
            _warn_about_training_structures(read, file, model.parent, console)
        structures[file], kept[file] = read, [new[i] for i in chosen(len(new), count, seed, file)]
    loaded: dict[Path, Method] = {}
    for path in models:  # a model that cannot be used must stop the command before the first evaluation
        loaded[path] = _load(path, weights, trust=trust, device=chosen_device(device), several=len(models) > 1)
        if report is not None:
            loaded[path].spread_samples(samples)  # raises an error for a method without a spread
        for file in files:
            with in_file(file):
                loaded[path].backbone.check(structures[file], kept[file])
    record: dict[str, Any] = {"model": names[model], "seed": seed}
    inside: dict[str, Evaluation] = {}  # by model
    outside: dict[str, Evaluation] = {}  # of the first model, by file
    for path in models:
        for file in files:
            asked = [structures[file][i] for i in kept[file]]
            with progress_bar(console) as bar, in_file(file, structures[file]):
                show = counter(bar, f"{names[path]} on {called[file]}", len(asked))
                result = evaluation.evaluate(loaded[path], asked, samples=samples, seed=seed, progress=show)
            console.print(score_table_of(f"{names[path]} on {called[file]}", result))
            for verdict, text in energy_and_stress(Entry(names[path], called[file], result)):
                console.print(text, style=COLOURS[verdict], markup=False, highlight=False)
            if file is data:
                inside[names[path]] = result
            elif path is model:
                outside[called[file]] = result
            scored = evaluation.as_record(result)
            first = inside[names[path]]
            measured = bool(first.spread.any()) or first.novelty is not None
            if file is not data and measured and all(np.isfinite(x.error).all() for x in (first, result)):
                scored["against"] = {called[data]: evaluation.compare(first, result)}
                console.print(comparison_line(called[data], called[file], scored["against"][called[data]]))
            place = record if path is model else record.setdefault("compared", {}).setdefault(names[path], {})
            place[called[file]] = scored
    if any(result.spread.any() for result in inside.values()):
        titles = ["SSR", "|F| alone", "beyond |F|", "best possible"]
        if any(result.novelty is not None for result in inside.values()):
            titles += ["novelty", "one pass"]
        console.print(legend(*titles))
    first_model = Entry(names[model], called[data], inside[names[model]])
    verdict, text = headline(first_model, [Entry(names[model], name, result) for name, result in outside.items()])
    record |= {"verdict": verdict, "verdict_text": text, **environment()}
    if out is not None:
        write_json(out, record)
    if report is not None:
        made = {names[path]: as_record(one.history, one.calibration) for path, one in loaded.items()}
        records = {name: own for name, own in made.items() if own}
        write_report(report, inside, data=called[data], unseen=outside, records=records)
        console.print(f"the report was written to {report}")
    prefix = f"{names[model]}: " if len(models) > 1 else ""
    console.print(prefix + text, style=f"bold {COLOURS[verdict]}", markup=False, highlight=False)
    print_json(record, as_json)


def _load(path: Path, weights: Path | None, *, trust: bool, device: str, several: bool) -> "Method":
    """The model in a file; of several models, only some may need the given weights."""
    from pmlip.loading import load

    try:
        loaded: Method = load(path, weights=weights, trust=trust, device=device)
    except ValueError as error:
        if weights is None or not several:
            raise
        try:
            loaded = load(path, trust=trust, device=device)
        except (ValueError, OSError):
            raise error from None  # this error names the given weights
    return loaded


def _names(paths: Sequence[Path], short: Sequence[str]) -> dict[Path, str]:
    """The names to print for the files: their short name, or the whole path if two files share it."""
    named = dict(zip(paths, short, strict=True))
    taken = list(named.values())
    return {path: name if taken.count(name) == 1 else str(path) for path, name in named.items()}


def _warn_about_training_structures(structures: "Sequence[Atoms]", file: Path, run: Path, console: Console) -> None:
    """Print a warning if the run that made the model, in the folder of its file, used some of these structures."""
    seen = _excluded(run) if (run / SUMMARY_FILE).is_file() else set()
    known = sum(name_of_structure(atoms) in seen for atoms in structures) if seen else 0
    if known:
        console.print(
            f"warning: {file}: the model was trained or calibrated on {known} of {len(structures)} structures, so its "
            f"errors are too small there; leave them out with --exclude {run}",
            markup=False,
        )


def _excluded(folder: Path | None) -> set[str]:
    """Fingerprints of the structures that a run used."""
    from pmlip.atomic_files import read_json

    if folder is None:
        return set()
    file = folder / SUMMARY_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a finished run: it has no {SUMMARY_FILE}")
    summary = read_json(file)
    if "seen" not in summary:
        raise ValueError(f"{file} was written by an older pmlip and does not list the structures that the run used")
    if not isinstance(summary["seen"], list) or not all(isinstance(name, str) for name in summary["seen"]):
        raise ValueError(f"{file} is damaged: it does not list the structures that the run used")
    return set(summary["seen"])
