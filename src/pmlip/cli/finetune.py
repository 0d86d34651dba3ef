"""pmlip finetune: from a file of DFT data to a model that tells how sure it is."""

import contextlib
import dataclasses
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from rich.console import Console

from pmlip import methods
from pmlip.atomic_files import write_json
from pmlip.backbones import load_backbone
from pmlip.cli.calibrate import calibrate_and_say
from pmlip.cli.checks import chosen, chosen_device, name_of_structure
from pmlip.cli.progress import progress_bar, resumable
from pmlip.methods.base import FIXED_ATOMS, Method
from pmlip.provenance import DataSource, as_record
from pmlip.samples import SMALLEST_SPREAD
from pmlip.structures.atoms import in_file, subsample
from pmlip.structures.files import read_structures
from pmlip.structures.labels import labels
from pmlip.training.config import FinetuneConfig
from pmlip.training.distributed import Processes
from pmlip.training.finetuning import finetune, seconds_per_step

FEWEST_FOR_CALIBRATION, MOST_FOR_CALIBRATION = 4, 64  # structures: below, one of them decides; above, it takes long


def run(
    train: Path,
    valid: Path | None,
    *,
    keys: Mapping[str, str | None],
    count: int | None,
    calibrated: bool,
    backbone: str,
    weights: Path | None,
    trust: bool,
    method: str,
    options: Mapping[str, Any],
    config: FinetuneConfig,
    out: Path,
    device: str | None,
    tensorboard: bool,
    dry_run: bool,
    quiet: bool,
) -> dict[str, Any]:
    """The summary of the run, or what a dry run would do; empty for all processes but the first."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder for the files of this run")
    processes = Processes.start(chosen_device(device))
    console = Console(quiet=quiet or processes.rank > 0, stderr=dry_run)  # a dry run prints a settings file
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ImportError("curves for TensorBoard need: pip install tensorboard")
    torch.manual_seed(config.seed)  # of what a method adds to the backbone; the same in all processes
    trained = methods.make(method, load_backbone(backbone, weights=weights, trust=trust), **options)
    structures, held_out = [], []
    files: dict[Path, list[Atoms]] = {}
    for file in [train] if valid is None else [train, valid]:
        read, found = read_structures(file, **keys)
        console.print(str(found))
        if "forces" in config.learned:
            found.require("forces")
        if valid is None:
            kept, held = _split(len(read), count, config.seed, file)
            console.print(f"held out for validation: {len(held)} of them, chosen by the seed; to train on: {len(kept)}")
        else:
            everything = list(range(len(read)))
            kept, held = (chosen(len(read), count, config.seed, file), []) if file is train else ([], everything)
        files[file] = read
        structures += [read[i] for i in kept]
        held_out += [read[i] for i in held]
    if dry_run:
        given: dict[str, Any] = {
            "train": train,
            "valid": valid,
            **keys,
            "count": count,
            "calibrate": calibrated,
            "backbone": backbone,
            "weights": weights,
        }
        given |= {"trust": trust, "method": method, "option": [f"{name}={value}" for name, value in options.items()]}
        given |= {"out": out, "device": device, "tensorboard": tensorboard, **dataclasses.asdict(config)}
        with _in_files(files):
            seconds = seconds_per_step(trained, structures, config, processes)
        steps = config.steps_for(len(structures))
        steps *= len(trained.learner().parts())
        if not console.quiet:
            print(as_toml(given))
            print(f"# {steps} steps of {seconds:.2f} s: about {steps * seconds / 60:.0f} minutes")
        shown = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        return {"settings": shown, "steps": steps, "seconds_per_step": seconds}
    curves = out / "tensorboard" if tensorboard and processes.rank == 0 else None
    with progress_bar(console) as bar, _tensorboard(curves) as write_curves:
        task = bar.add_task("fine-tuning", total=None)
        best = float("inf")

        def show(step: int, steps: int, latest: Mapping[str, float]) -> None:
            nonlocal best
            best = min(best, latest.get("valid", best))
            scored = f", validation {best:.3f}" if best < float("inf") else ""
            loss = f" loss {latest['loss']:.3f}" if "loss" in latest else ""
            bar.update(task, completed=step, total=steps, description=f"fine-tuning{loss}{scored}")
            write_curves(step, latest)

        with resumable(console), warnings.catch_warnings(), _in_files(files):
            warnings.showwarning = lambda message, *_: console.print(f"warning: {train}: {message}", markup=False)
            result = finetune(
                trained, structures, valid=held_out, config=config, folder=out, processes=processes, progress=show
            )
    if processes.rank:
        return {}
    assert trained.history is not None
    trained.history = dataclasses.replace(
        trained.history,
        train=DataSource(train.name, len(structures)),
        valid=DataSource(valid.name if valid else train.name, len(held_out)),
    )
    if calibrated and trained.learner().calibrated_after:
        data = valid.name if valid else f"what was held out of {train.name}"
        trained.save(out / "model.pt")  # nothing that happens now costs the run
        _calibrate(trained, held_out, data, console)
    trained.save(out / "model.pt")
    summary = {"backbone": backbone, "method": method, "options": dict(options)}
    summary |= as_record(trained.history, trained.calibration)
    summary["seen"] = [name_of_structure(atoms) for atoms in (*structures, *held_out)]
    write_json(out / "summary.json", summary)
    console.print(f"{result.steps} steps in {result.seconds:.0f} s; the model is {out / 'model.pt'}")
    console.print(f"next: pmlip evaluate {out / 'model.pt'} TEST.extxyz --report report.html")
    return summary


@contextlib.contextmanager
def _in_files(files: Mapping[Path, list[Atoms]]) -> Iterator[None]:
    """Errors about structures name the file, and the number of the structure in it."""
    with contextlib.ExitStack() as stack:
        for file, structures in files.items():
            stack.enter_context(in_file(file, structures))
        yield


def _calibrate(trained: Method, held_out: Sequence[Atoms], data: str, console: Console) -> None:
    """Scale the spread to the validation data, as far as they allow."""
    usable = [atoms for atoms in held_out if _tells_of_errors(atoms)]
    if len(usable) < FEWEST_FOR_CALIBRATION:
        console.print(
            f"{len(usable)} validation structures with forces other than zero are too few to scale the spread to: it "
            "is as trained; `pmlip calibrate` scales it to others"
        )
        return
    some = subsample(usable, MOST_FOR_CALIBRATION)
    calibrate_and_say(trained, some, data=data, chunk_atoms=FIXED_ATOMS, console=console)


def _tells_of_errors(atoms: Atoms) -> bool:
    """Whether it has forces that symmetry does not fix."""
    forces = labels([atoms]).forces
    return bool(forces.isfinite().all() and (forces.abs() > SMALLEST_SPREAD).any())


def _split(available: int, count: int | None, seed: int, path: Path) -> tuple[list[int], list[int]]:
    """Which to train on (`count`, if given), and which to hold out: a tenth, at least 4 of those of 16 or more."""
    wanted = available if count is None else count
    held = max(4 if wanted >= 16 else 2, round(0.1 * wanted))
    if available < 4 or (count is not None and count + held > available):
        raise ValueError(
            f"{path} holds {available} structures, too few to train on {available - held if count is None else count} "
            f"and hold out {held} for validation; give validation structures with --valid"
        )
    order = np.random.default_rng([seed, 3]).permutation(available).tolist()
    return sorted(order[held:] if count is None else order[held : held + count]), sorted(order[:held])


def as_toml(settings: Mapping[str, Any]) -> str:
    """The settings as a file that `--settings` takes; TOML has no word for what is not set."""
    lines = [
        f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value)}"
        for name, value in settings.items()
        if value is not None
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _tensorboard(folder: Path | None) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A function (step, latest) that writes curves to this folder as they grow; None: nowhere."""
    if folder is None:
        yield lambda step, latest: None
        return
    from torch.utils.tensorboard import SummaryWriter

    writers: list[SummaryWriter] = []

    def write(step: int, latest: Mapping[str, float]) -> None:
        if not latest:  # this is where a run goes on
            return
        if not writers:  # steps that an interrupted run made after its last save are made again
            writers.append(SummaryWriter(folder, purge_step=step, flush_secs=10))
        for name, value in latest.items():
            writers[0].add_scalar(name, value, step)

    try:
        yield write
    finally:
        for writer in writers:
            writer.close()
