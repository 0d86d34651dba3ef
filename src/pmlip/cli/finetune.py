"""pmlip finetune: from a file of DFT data to a model that predicts an uncertainty."""

import contextlib
import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pmlip.cli.calibrate import calibrate_and_print
from pmlip.cli.checks import chosen, chosen_device, name_of_structure, refuse_inputs
from pmlip.cli.novelty import fit_and_print
from pmlip.cli.options import (
    AsJson,
    Device,
    EnergyKey,
    ForcesKey,
    SettingsFile,
    StressKey,
    Trust,
    Weights,
    options_of,
    print_json,
)
from pmlip.cli.progress import counter, printed_warnings, progress_bar, resumable
from pmlip.locks import locked_folder
from pmlip.run_folder import MODEL_FILE, SUMMARY_FILE
from pmlip.training.config import FinetuneConfig

if TYPE_CHECKING:
    from ase import Atoms

    from pmlip.methods.base import Method

FILES = (MODEL_FILE, "last.pt", "log.jsonl", SUMMARY_FILE)  # that a run writes
FEWEST_FOR_CALIBRATION, MOST_FOR_CALIBRATION = 4, 64  # structures: fewer are unreliable, more take long


@options_of(FinetuneConfig)
def finetune(
    train: Annotated[Path, typer.Argument(help="Training structures with DFT labels: extxyz, ase.db, npz.")],
    *,
    settings_file: SettingsFile = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print all settings as TOML and the time of one step, without training."),
    ] = False,
    valid: Annotated[
        Path | None,
        typer.Option(
            help="Validation structures with DFT labels. Default: a tenth of TRAIN, chosen at random, is held out.",
            rich_help_panel="Data",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train on this many structures of TRAIN, chosen at random; by default on all.",
            rich_help_panel="Data",
        ),
    ] = None,
    references: Annotated[
        Path | None,
        typer.Option(
            help="Energies of isolated atoms with the DFT settings of TRAIN: a file of single atoms, or JSON such as "
            '{"H": -13.6}. Default: single atoms in TRAIN. They make energies of different compositions comparable.',
            rich_help_panel="Data",
        ),
    ] = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    backbone: Annotated[
        str,
        typer.Option(
            help="Pretrained potential: chgnet, orb:orb_v3_direct_20_omat, sevenn:7net-0, mace.",
            rich_help_panel="Model",
        ),
    ] = "chgnet",
    weights: Weights = None,
    trust: Trust = False,
    method: Annotated[
        str,
        typer.Option(
            help="Uncertainty method: p, p-ensemble, or for comparison deterministic, ensemble, blip, mc-dropout, ...",
            rich_help_panel="Model",
        ),
    ] = "p",
    option: Annotated[
        list[str] | None,
        typer.Option(help="Option of the method, for example members=5; repeatable.", rich_help_panel="Model"),
    ] = None,
    device: Device = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            help="Calibrate the spread on the validation structures after training.",
            rich_help_panel="Noise",
        ),
    ] = True,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the model and the state of the run; use a new one for each run.", rich_help_panel="Output"
        ),
    ] = Path("pmlip-model"),
    tensorboard: Annotated[
        bool, typer.Option(help="Write training curves for TensorBoard to OUT/tensorboard.", rich_help_panel="Output")
    ] = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Fine-tune a pretrained potential on DFT data, so that it predicts an uncertainty.

    To continue after an interruption, run the same command again. To use several processes: torchrun --nproc-per-node 2
    -m pmlip finetune ...

    Example: pmlip finetune silica.extxyz --backbone chgnet --epochs 20 --out p-chgnet
    """
    import torch
    from ase.data import chemical_symbols

    from pmlip import methods
    from pmlip.atomic_files import write_json
    from pmlip.backbones import load_backbone
    from pmlip.novelty import KINDS
    from pmlip.provenance import DataSource, as_record
    from pmlip.structures.energy_offsets import guessed_offsets, without_isolated
    from pmlip.training import finetuning
    from pmlip.training.distributed import Processes

    config, options = FinetuneConfig(**settings), _options(option or [])
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a folder")
    for name in FILES:
        refuse_inputs(out / name, [train, valid, weights, settings_file])
    processes = Processes.start(chosen_device(device))
    # a dry run prints a settings file to stdout, so all else goes to stderr
    console = Console(quiet=as_json or processes.rank > 0, stderr=dry_run)
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ImportError("--tensorboard needs: pip install tensorboard")
    # process 0 writes for all; a dry run writes nothing
    with contextlib.nullcontext() if dry_run or processes.rank else locked_folder(out):
        torch.manual_seed(config.seed)  # the parameters that a method adds start equal in all processes
        trained = methods.make(method, load_backbone(backbone, weights=weights, trust=trust), **options)
        keys = {"energy_key": energy_key, "forces_key": forces_key, "stress_key": stress_key}
        files = {file: _read(file, keys, config, console) for file in ([train] if valid is None else [train, valid])}
        learnable = {file: without_isolated(read) for file, read in files.items()}
        isolated = {number: energy for _, own in reversed(learnable.values()) for number, energy in own.items()}
        isolated |= _read_references(references, energy_key) if references else {}
        if isolated:
            console.print(f"energies of isolated atoms: {', '.join(chemical_symbols[number] for number in isolated)}")
        usable = {file: rest for file, (rest, _) in learnable.items()}
        structures, held_out = _choose(usable, train, valid, count=count, seed=config.seed, console=console)
        if dry_run:
            given: dict[str, Any] = {
                "train": train,
                "valid": valid,
                "references": references,
                **keys,
                "count": count,
                "calibrate": calibrate,
                "backbone": backbone,
                "weights": weights,
            }
            given |= {
                "trust": trust,
                "method": method,
                "option": [f"{name}={value}" for name, value in options.items()],
            }
            given |= {"out": out, "device": device, "tensorboard": tensorboard, **dataclasses.asdict(config)}
            with _in_files(files):
                seconds = finetuning.seconds_per_step(trained, structures, config, processes)
            steps = config.steps_for(len(structures)) * len(trained.learner().parts())
            if not console.quiet:
                print(as_toml(given))
                minutes = f"{steps} steps of {seconds:.2f} s: about {steps * seconds / 60:.0f} minutes"
                print(f"# {minutes}; validation and the fits after training take about a quarter more")
            shown = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
            print_json({"settings": shown, "steps": steps, "seconds_per_step": seconds}, as_json and not processes.rank)
            return
        curves = out / "tensorboard" if tensorboard and processes.rank == 0 else None
        with progress_bar(console) as bar, _tensorboard(curves) as write_curves:
            task = bar.add_task("fine-tuning", total=None)
            best = float("inf")

            def show(step: int, steps: int, latest: Mapping[str, float]) -> None:
                nonlocal best
                best = min(best, latest.get("valid", best))
                scored = f", validation {best:.3f}" if best < float("inf") else ""
                loss = f" loss {latest['loss']:.3f}" if "loss" in latest else ""
                what = f"fine-tuning{loss}{scored}"
                if step == steps:  # this takes as long as some hundred predictions
                    what = "aligning the energies of the samples"
                bar.update(task, completed=step, total=steps, description=what)
                write_curves(step, latest)

            with resumable(console), printed_warnings(console, train), _in_files(files):
                result = finetuning.finetune(
                    trained,
                    structures,
                    valid=held_out,
                    config=config,
                    folder=out,
                    references=isolated,
                    processes=processes,
                    progress=show,
                    fitting=counter(bar, "tangent samples"),
                )
        processes.stop()
        if processes.rank:
            return
        assert trained.history is not None
        trained.history = dataclasses.replace(
            trained.history,
            train=DataSource(train.name, len(structures)),
            valid=DataSource(valid.name if valid else train.name, len(held_out)),
        )
        if calibrate and trained.learner().calibrated_after:
            data = valid.name if valid else f"structures held out from {train.name}"
            trained.save(out / MODEL_FILE)  # so that an error in the calibration does not lose the run
            _calibrate(trained, held_out, data, energies="energy" in config.learned, console=console)
        trained.save(out / MODEL_FILE)
        lacking = [kind for kind in KINDS if kind not in trained.training_features]
        with _in_files(files):
            fit_and_print(trained, structures, held_out, kinds=lacking, console=console)
        trained.save(out / MODEL_FILE)
        if note := guessed_offsets(result.offsets, trained.history.compositions, isolated):
            console.print(f"note: {note} with --references", markup=False)
        summary = {"backbone": backbone, "method": method, "options": dict(options)}
        summary |= as_record(trained.history, trained.calibration)
        summary["seen"] = [name_of_structure(atoms) for atoms in (*structures, *held_out)]
        write_json(out / SUMMARY_FILE, summary)
        console.print(f"{result.steps} steps in {result.seconds:.0f} s; the model was written to {out / 'model.pt'}")
        console.print(f"next: pmlip evaluate {out / 'model.pt'} TEST.extxyz --report report.html")
        print_json(summary, as_json)


def _options(pairs: Sequence[str]) -> dict[str, float | int]:
    """The options of a method, from name=number."""
    options: dict[str, float | int] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            options[name.replace("-", "_")] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"an option of a method is written name=number, got {pair!r}")
    return options


def _read(file: Path, keys: Mapping[str, str | None], config: FinetuneConfig, console: Console) -> "list[Atoms]":
    from pmlip.structures.files import read_structures

    read, found = read_structures(file, **keys)
    console.print(str(found))
    if "forces" in config.learned:
        found.require("forces")
    return read


def _read_references(file: Path, energy_key: str | None) -> dict[int, float]:
    """Energies of isolated atoms by atomic number, from JSON or from a file of single atoms."""
    from ase.data import atomic_numbers

    from pmlip.atomic_files import read_json
    from pmlip.structures.energy_offsets import without_isolated
    from pmlip.structures.files import read_structures

    if file.suffix != ".json":
        rest, energies = without_isolated(read_structures(file, energy_key=energy_key)[0])
        if rest or not energies:
            raise ValueError(f"--references {file} must hold single atoms with energies, and nothing else")
        return energies
    try:
        given = read_json(file)
        return {atomic_numbers[symbol]: float(energy) for symbol, energy in given.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f'--references {file} must hold an energy in eV for each element symbol, such as {{"H": -13.6}}: {error}'
        ) from None


def _choose(
    files: "Mapping[Path, list[Atoms]]",
    train: Path,
    valid: Path | None,
    *,
    count: int | None,
    seed: int,
    console: Console,
) -> "tuple[list[Atoms], list[Atoms]]":
    """The structures to train on, and the structures to hold out for validation."""
    read = files[train]
    if valid is not None:
        return [read[i] for i in chosen(len(read), count, seed, train)], files[valid]
    kept, held = _split(len(read), count, seed, train)
    console.print(f"held out for validation, chosen at random: {len(held)} structures; training: {len(kept)}")
    return [read[i] for i in kept], [read[i] for i in held]


@contextlib.contextmanager
def _in_files(files: "Mapping[Path, list[Atoms]]") -> Iterator[None]:
    """Errors about structures name their file, and the number of the structure in it."""
    from pmlip.structures.atoms import in_file

    with contextlib.ExitStack() as stack:
        for file, structures in files.items():
            stack.enter_context(in_file(file, structures))
        yield


def _calibrate(trained: "Method", held_out: "Sequence[Atoms]", data: str, *, energies: bool, console: Console) -> None:
    """Calibrate the spread on the validation structures, if there are enough of them."""
    from pmlip.methods.base import FIXED_ATOMS
    from pmlip.structures.atoms import subsample

    usable = [atoms for atoms in held_out if _has_free_forces(atoms)]
    if len(usable) < FEWEST_FOR_CALIBRATION:
        console.print(
            f"The spread was not calibrated: it takes at least {FEWEST_FOR_CALIBRATION} validation structures with "
            f"non-zero forces, and there are {len(usable)}. Use `pmlip calibrate` with other structures."
        )
        return
    some = subsample(usable, MOST_FOR_CALIBRATION)
    calibrate_and_print(trained, some, data=data, energies=energies, chunk_atoms=FIXED_ATOMS, console=console)


def _has_free_forces(atoms: "Atoms") -> bool:
    """Whether it has forces that symmetry does not fix at zero."""
    from pmlip.samples import SMALLEST_SPREAD
    from pmlip.structures.labels import labels

    forces = labels([atoms]).forces
    return bool(forces.isfinite().all() and (forces.abs() > SMALLEST_SPREAD).any())


def _split(available: int, count: int | None, seed: int, path: Path) -> tuple[list[int], list[int]]:
    """Indices to train on (`count`, if given) and to hold out: a tenth; at least 2, and at least 4 from 16 on."""
    import numpy as np

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
    """The settings as a file for `--settings`, without settings that are None, since TOML has no null."""
    lines = [
        f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value)}"
        for name, value in settings.items()
        if value is not None
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _tensorboard(folder: Path | None) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A function (step, latest) that adds a point to the curves in this folder; does nothing if it is None."""
    if folder is None:
        yield lambda step, latest: None
        return
    from torch.utils.tensorboard import SummaryWriter

    writers: list[SummaryWriter] = []

    def write(step: int, latest: Mapping[str, float]) -> None:
        if not latest:  # a run that continues starts here
            return
        if not writers:  # an interrupted run repeats the steps after its last save
            writers.append(SummaryWriter(folder, purge_step=step, flush_secs=10))
        for name, value in latest.items():
            writers[0].add_scalar(name, value, step)

    try:
        yield write
    finally:
        for writer in writers:
            writer.close()
