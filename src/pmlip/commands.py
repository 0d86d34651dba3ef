"""The work behind the commands: from files to files, with a progress bar between."""

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.units import GPa
from lightning_fabric import Fabric
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from pmlip import methods, model
from pmlip.backbones import Backbone, load_backbone
from pmlip.benchmark.record import environment
from pmlip.evaluation import Evaluation, as_record, compare
from pmlip.evaluation import evaluate as evaluate_model
from pmlip.files import write_json
from pmlip.progress import progress_bar
from pmlip.reading import read_structures
from pmlip.structures import StructureError, check_labels, fingerprint
from pmlip.training import FinetuneConfig, finetune


def run_finetune(
    train: Path,
    valid: Path | None,
    *,
    keys: Mapping[str, str | None],
    count: int | None,
    backbone: str,
    weights: Path | None,
    trust: bool,
    method: str,
    options: Mapping[str, Any],
    config: FinetuneConfig,
    out: Path,
    tensorboard: bool,
) -> None:
    fabric = _fabric()
    console = Console(quiet=fabric.global_rank > 0)
    trained = methods.make(method, load_backbone(backbone, weights=weights, trust=trust), **options)
    structures, held_out = [], []
    for file in [train] if valid is None else [train, valid]:
        read, found = read_structures(file, **keys)
        console.print(str(found))
        with _in_file(file):
            check_labels(read, config.learned, missing=config.missing)
        if valid is None:
            kept, held = _split(len(read), count, config.seed, file)
            console.print(f"held out for validation: {len(held)} of them, chosen by the seed; to train on: {len(kept)}")
        else:
            everything = list(range(len(read)))
            kept, held = (_chosen(len(read), count, config.seed, file), []) if file is train else ([], everything)
        with _in_file(file):
            _check_structures(trained.backbone, read, [*kept, *held])
        structures += [read[i] for i in kept]
        held_out += [read[i] for i in held]
    with progress_bar(console) as bar:
        task = bar.add_task("fine-tuning", total=None)
        best = float("inf")

        def show(step: int, steps: int, latest: Mapping[str, float]) -> None:
            nonlocal best
            best = min(best, latest.get("valid", best))
            scored = f", validation {best:.3f}" if best < float("inf") else ""
            loss = f" loss {latest['loss']:.3f}" if "loss" in latest else ""
            bar.update(task, completed=step, total=steps, description=f"fine-tuning{loss}{scored}")

        try:
            result = finetune(
                trained, structures, valid=held_out, config=config, folder=out, fabric=fabric, progress=show
            )
        except KeyboardInterrupt:
            console.print("stopped, and nothing is lost: the same command goes on from here")
            raise
    if fabric.global_rank:
        return
    trained.save(out / "model.pt")
    record = {
        "backbone": backbone,
        "method": method,
        "options": dict(options),
        "train": {"file": train.name, "structures": len(structures), "fingerprints": _fingerprints(structures)},
        "valid": {"structures": len(held_out), "fingerprints": _fingerprints(held_out)},
        "config": dataclasses.asdict(config),
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "offsets": result.offsets,
        "error_before": result.scales,
        "validation": result.best,
        **environment(),
    }
    write_json(out / "summary.json", record)
    if tensorboard:
        _write_tensorboard(out / "tensorboard", result.log)
    console.print(f"{result.steps} steps in {result.seconds:.0f} s; the model is {out / 'model.pt'}")
    console.print(f"next: pmlip evaluate {out / 'model.pt'} TEST.extxyz")


def run_evaluate(
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
        with _in_file(file):
            _check_structures(loaded.backbone, structures, range(len(structures)))
        structures = [atoms for atoms in structures if not left_out or fingerprint([atoms])[:16] not in left_out]
        structures = [structures[i] for i in _chosen(len(structures), count, seed, file)]
        with progress_bar(console) as bar:
            show = partial(_show_structures, bar, bar.add_task(file.name, total=len(structures)))
            result = evaluate_model(loaded, structures, samples=samples, seed=seed, progress=show)
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


def _fabric() -> Fabric:
    """One process, or those that torchrun started; a GPU each where there are any."""
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if world == 1:
        return Fabric(accelerator=accelerator, devices=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric = Fabric(accelerator=accelerator, devices=local, num_nodes=world // local, strategy="ddp")
        fabric.launch()
    return fabric


def _check_structures(backbone: Backbone, structures: Sequence[Atoms], chosen: Sequence[int]) -> None:
    """Find out now, not in an hour, whether the potential can take them all."""
    for index in chosen:
        try:
            backbone.graph([structures[index]])
        except StructureError as error:
            raise error.after(index) from None


def _chosen(available: int, count: int | None, seed: int, path: Path) -> list[int]:
    if count is None:
        return list(range(available))
    if count > available:
        raise ValueError(f"{count} structures were asked for, but {path} holds {available} to choose from")
    return sorted(np.random.default_rng([seed, 3]).permutation(available)[:count].tolist())


def _split(available: int, count: int | None, seed: int, path: Path) -> tuple[list[int], list[int]]:
    """Which to train on, and which to hold out: a tenth, at least 2. With `count`, so many are trained on."""
    held = max(2, round(0.1 * (available if count is None else count)))
    if available < 4 or (count is not None and count + held > available):
        raise ValueError(
            f"{path} holds {available} structures, too few to train on {available - held if count is None else count} "
            f"and hold out {held} for validation; give validation structures with --valid"
        )
    order = np.random.default_rng([seed, 3]).permutation(available).tolist()
    return sorted(order[held:] if count is None else order[held : held + count]), sorted(order[:held])


def _fingerprints(structures: Sequence[Atoms]) -> list[str]:
    return [fingerprint([atoms])[:16] for atoms in structures]


def _excluded(folder: Path | None) -> set[str]:
    """Fingerprints of the structures that a run has seen."""
    if folder is None:
        return set()
    file = folder / "summary.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a finished run: it has no summary.json")
    summary = json.loads(file.read_text())
    return {*summary["train"]["fingerprints"], *summary["valid"]["fingerprints"]}


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


def _write_tensorboard(folder: Path, log: Sequence[Mapping[str, float]]) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("curves for TensorBoard need: pip install tensorboard") from error
    with SummaryWriter(folder) as writer:
        for line in log:
            for name, value in line.items():
                if name not in ("step", "seconds"):
                    writer.add_scalar(name, value, int(line["step"]))


@contextlib.contextmanager
def _in_file(path: Path) -> Iterator[None]:
    """Errors about a structure name the file it came from."""
    try:
        yield
    except StructureError as error:
        raise ValueError(f"{path}: {error}") from error
