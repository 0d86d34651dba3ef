"""pmlip evaluate: the scores of a model and its uncertainty on structures with labels."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ase.units import GPa
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from pmlip import model
from pmlip.benchmark.record import environment
from pmlip.commands.checks import check_structures, chosen, in_file
from pmlip.evaluation import Evaluation, as_record, compare, evaluate
from pmlip.files import write_json
from pmlip.progress import progress_bar
from pmlip.reading import read_structures
from pmlip.structures import fingerprint


def run(
    path: Path,
    data: Path,
    unseen: Sequence[Path],
    *,
    keys: Mapping[str, str | None],
    samples: int,
    seed: int,
    count: int | None,
    exclude: Path | None,
    weights: Path | None,
    trust: bool,
    out: Path | None,
    console: Console,
) -> dict[str, Any]:
    loaded = model.load(path, weights=weights, trust=trust)
    left_out = _excluded(exclude)
    record: dict[str, Any] = {"model": path.name, "seed": seed}
    inside: Evaluation | None = None
    for file in (data, *unseen):
        structures, _ = read_structures(file, **keys)
        with in_file(file):
            check_structures(loaded.backbone, structures, range(len(structures)))
        structures = [atoms for atoms in structures if not left_out or fingerprint([atoms])[:16] not in left_out]
        structures = [structures[i] for i in chosen(len(structures), count, seed, file)]
        with progress_bar(console) as bar:
            show = partial(_show_structures, bar, bar.add_task(file.name, total=len(structures)))
            result = evaluate(loaded, structures, samples=samples, seed=seed, progress=show)
        record[file.name] = as_record(result)
        console.print(_table(file.name, result))
        if inside is None:
            inside = result
        elif inside.spread.any():
            record[file.name]["against"] = {data.name: compare(inside, result)}
            against = record[file.name]["against"][data.name]
            console.print(
                f"{file.name} against {data.name}: error times {against['error_ratio']:.2f}, spread times "
                f"{against['spread_ratio']:.2f}; AUROC of the spread {against['auroc_spread']:.2f}, of the error "
                f"{against['auroc_error']:.2f}"
            )
    record |= environment()
    if out is not None:
        write_json(out, record)
    return record


def _show_structures(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)


def _excluded(folder: Path | None) -> set[str]:
    """Fingerprints of the structures that a run has seen."""
    if folder is None:
        return set()
    file = folder / "summary.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a finished run: it has no summary.json")
    return set(json.loads(file.read_text())["fingerprints"])


def _table(name: str, result: Evaluation) -> Table:
    table = Table(title=f"{name}: {result.structures} structures, K = {result.samples}, {result.seconds:.0f} s")
    for column in ("", "MAE", "without noise", "CRPS", "spread", "RMSE", "SSR", "in 95 %"):
        table.add_column(column, justify="right")
    units = {"energy": ("energy, meV/atom", 1e3), "forces": ("forces, meV/Å", 1e3), "stress": ("stress, GPa", 1 / GPa)}
    for output, values in result.scores.items():
        title, unit = units[output]
        scaled = [values.get(key) for key in ("mae", "mae_without_noise", "crps", "spread", "rmse")]
        cells = ["" if value is None else f"{unit * value:.3g}" for value in scaled]
        ratios = [f"{values[key]:.2f}" if key in values else "" for key in ("ssr", "coverage_95")]
        table.add_row(title, *cells, *ratios)
    forces = result.scores.get("forces", {})
    if "spearman_structure" in forces:
        table.caption = (
            f"Spearman of spread and error: structures {forces['spearman_structure']:.2f} (|F| alone "
            f"{forces['spearman_structure_of_force']:.2f}, beyond |F| {forces['spearman_structure_given_force']:.2f}), "
            f"atoms {forces['spearman_atom']:.2f} (|F| alone {forces['spearman_atom_of_force']:.2f})"
        )
    return table
