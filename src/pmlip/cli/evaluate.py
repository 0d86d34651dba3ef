"""pmlip evaluate: the scores of a model and its uncertainty on structures with labels."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pmlip.cli.checks import check_folder, chosen, chosen_device, name_of_structure
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

if TYPE_CHECKING:
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
            help="Another model file, to compare with on the same structures; repeatable.", rich_help_panel="Model"
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
    from pmlip.provenance import environment
    from pmlip.report import Judged, check_installed, write_report
    from pmlip.structures.atoms import in_file
    from pmlip.structures.files import read_structures
    from pmlip.structures.labels import require_labels

    console = Console(quiet=as_json)
    models, files = [model, *(compare or [])], [data, *(unseen or [])]
    if report is not None:
        check_installed()
    for file in (out, report):
        if file is not None:
            check_folder(file)
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
            console.print(f"excluded, used by the run in {exclude}: {len(read) - len(new)} of {len(read)} structures")
        structures[file], kept[file] = read, [new[i] for i in chosen(len(new), count, seed, file)]
    record: dict[str, Any] = {"model": model.name, "seed": seed}
    judged: list[Judged] = []
    outside: list[Judged] = []
    made = {}
    for path in models:
        loaded = _load(path, weights, trust=trust, device=chosen_device(device), several=len(models) > 1)
        made[names[path]] = loaded.record
        if report is not None:
            loaded.spread_samples(samples)  # raises an error for a method without a spread
        for file in files:
            with in_file(file):
                loaded.backbone.check(structures[file], kept[file])
            asked = [structures[file][i] for i in kept[file]]
            with progress_bar(console) as bar:
                show = counter(bar, f"{names[path]} on {called[file]}", len(asked))
                result = evaluation.evaluate(loaded, asked, samples=samples, seed=seed, progress=show)
            console.print(_table(f"{names[path]} on {called[file]}", result))
            own = Judged(names[path], called[file], result)
            (judged if file is data else outside).append(own)
            scored = evaluation.as_record(result)
            inside = judged[-1].evaluation
            if (
                file is not data
                and inside.spread.any()
                and all(np.isfinite(one.error).all() for one in (inside, result))
            ):
                against = evaluation.compare(inside, result)
                scored["against"] = {called[data]: against}
                console.print(
                    f"{called[file]} compared with {called[data]}: error times {against['error_ratio']:.2f}, spread "
                    f"times {against['spread_ratio']:.2f}; AUROC of the spread {against['auroc_spread']:.2f}, of the "
                    f"force {against['auroc_force']:.2f}, of the error {against['auroc_error']:.2f}"
                )
            place = record if path is model else record.setdefault("compared", {}).setdefault(names[path], {})
            place[called[file]] = scored
    record |= environment()
    if out is not None:
        write_json(out, record)
    if report is not None:
        of_first = [own for own in outside if own.model == names[model]]
        write_report(report, judged, of_first, records={name: made[name] for name in made if made[name]})
        console.print(f"the report was written to {report}")
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
            raise error from None  # the one about the given weights
    return loaded


def _names(paths: Sequence[Path], short: Sequence[str]) -> dict[Path, str]:
    """The names to print for the files: their short name, or the whole path if two files share it."""
    named = dict(zip(paths, short, strict=True))
    taken = list(named.values())
    return {path: name if taken.count(name) == 1 else str(path) for path, name in named.items()}


def _excluded(folder: Path | None) -> set[str]:
    """Fingerprints of the structures that a run used."""
    if folder is None:
        return set()
    file = folder / "summary.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a finished run: it has no summary.json")
    summary = json.loads(file.read_text())
    if "seen" not in summary:
        raise ValueError(f"{file} was written by an older pmlip and does not list the structures that the run used")
    return set(summary["seen"])


def _table(name: str, result: "Evaluation") -> Table:
    from ase.units import GPa

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
    """How well the spread ranks the errors of structures or atoms, with the reference values that are available."""
    titles = {"at_best": "at best", "of_force": "|F| alone", "given_force": "beyond |F|"}
    known = {title: forces.get(f"spearman_{level}_{name}") for name, title in titles.items()}
    beside = ", ".join(f"{title} {value:.2f}" for title, value in known.items() if value is not None)
    return f"{level}s {forces[f'spearman_{level}']:.2f}{f' ({beside})' if beside else ''}"
