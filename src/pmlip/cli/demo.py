"""The demo: CHGNet fine-tuned on the silica set that ships with pmlip, and how much it knows of its own errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pmlip import datasets
from pmlip.atomic_files import atomic_write
from pmlip.backbones import load_backbone
from pmlip.calibration import calibrate
from pmlip.cli.progress import resumable
from pmlip.cli.score_table import force_table
from pmlip.evaluation import Evaluation, as_record, evaluate
from pmlip.methods.p import Potential, perturb
from pmlip.report import check_installed, plots, write_report
from pmlip.structures.labels import labels
from pmlip.training.config import FinetuneConfig
from pmlip.training.finetuning import finetune

TRAINING, VALIDATION = 64, 16  # structures
TEST_SAMPLES = 16
SHOWN = ("mae_expected", "crps", "ssr", "spearman_atom", "spearman_atom_of_force")  # scores
STEP_COST = 2.5  # a pass of a training step against one without gradients, for the estimate of the time left
TESTS = {
    "test": "as in training",
    "hot": "1500 to 3000 K",
    "strained": "strained to 8 %",
    "polymorph": "other polymorphs",
}


def run(out: Path, *, steps: int, seed: int, console: Console) -> dict[str, Any]:
    """Gives the scores of each set of structures."""
    check_installed()
    train, valid = datasets.silica_pbe("train")[:TRAINING], datasets.silica_pbe("valid")[:VALIDATION]
    tests = {name: datasets.silica_pbe(name) for name in TESTS}
    model = perturb(load_backbone("chgnet"))
    console.print(
        f"CHGNet 0.3.0 with noise at {len(model.sites)} places is fine-tuned on {len(train)} structures of quartz and "
        f"cristobalite with PBE energies, forces and stress, and asked {TEST_SAMPLES} times about each of "
        f"{sum(map(len, tests.values()))} others."
    )
    before = float((model.predict(tests["test"]).forces - labels(tests["test"]).forces).abs().mean())
    config = FinetuneConfig(steps=steps, seed=seed)
    passes = STEP_COST * steps * config.batch * (config.samples + 1)  # and one without noise
    passes += config.validations * len(valid) * config.validation_samples
    calibrating = 2 * TEST_SAMPLES * len(valid)  # in two rounds, as a rule
    work = [passes + calibrating, *(TEST_SAMPLES * len(structures) for structures in tests.values())]
    with _bar(console) as bar:
        task = bar.add_task("fine-tuning", total=sum(work))

        def trained(step: int, steps: int, latest: Mapping[str, float]) -> None:
            crps = f", CRPS of forces {1e3 * latest['train_forces']:.0f} meV/Å" if latest else ""
            bar.update(task, completed=passes * step / steps, description=f"fine-tuning{crps}")

        with resumable(console):
            finetune(model, train, valid=valid, config=config, folder=out / "run", progress=trained)
        bar.update(task, description="scaling the spread to validation data")
        scaled = calibrate(model, valid, samples=TEST_SAMPLES, seed=seed)
        evaluations: dict[str, Evaluation] = {}  # by what the structures are called
        for number, (name, structures) in enumerate(tests.items()):
            done = sum(work[: number + 1])
            bar.update(task, completed=done, description=f"asking about {TESTS[name]}")

            def asked(count: int, total: int | None, done: float = done) -> None:
                bar.update(task, completed=done + TEST_SAMPLES * count)

            evaluations[TESTS[name]] = evaluate(model, structures, samples=TEST_SAMPLES, seed=seed, progress=asked)
        bar.update(task, completed=sum(work), description="done")
    title = f"Forces on structures not trained on, K = {TEST_SAMPLES} samples, meV/Å"
    console.print(force_table(title, evaluations, SHOWN))
    console.print(
        f"Before fine-tuning the MAE was {1e3 * before:.0f} meV/Å on the structures of the first row. After it, the "
        f"spread was scaled by {scaled.factor:.2f}, which suits {scaled.structures} validation structures.\n"
        "CRPS: the error of the whole distribution; without a spread it would be the MAE. SSR: spread over root mean "
        "square error, right at this K; 1 is calibrated, below 1 over-confident. Spearman: how well the spread of an "
        "atom ranks its error; |F| alone: how well the size of its force does. AUROC: how often a structure of this "
        "row has a larger spread than one of the first; 0.5 is chance."
    )
    _write(out, model, evaluations)
    console.print(f"report and pictures: {out / 'report.html'}, {out / 'spread-and-error.png'}, {out / 'unseen.png'}")
    console.print(f"model: {out / 'p-chgnet.pt'}")
    scores = {name: as_record(evaluations[called]) for name, called in TESTS.items()}
    return {"force_mae_before": before, **scores}


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # training and prediction differ in speed: the estimate is over a time in which both have their share
    return Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=120)


def _write(out: Path, model: Potential, evaluations: Mapping[str, Evaluation]) -> None:
    """The trained model, the report, and its two most telling pictures."""
    model.save(out / "p-chgnet.pt")
    (first, inside), *others = evaluations.items()
    write_report(out / "report.html", {"P-CHGNet": inside}, data=first, unseen=dict(others))
    atoms = {name: evaluation.columns["forces"].free_atoms for name, evaluation in evaluations.items()}
    pictures = {
        "spread-and-error": plots.spread_and_error(
            {name: (rows["spread"], rows["error"]) for name, rows in atoms.items()}
        ),
        "unseen": plots.inside_and_outside(
            {name: evaluation.spread for name, evaluation in evaluations.items()},
            {name: evaluation.error for name, evaluation in evaluations.items()},
        ),
    }
    for name, picture in pictures.items():
        with atomic_write(out / f"{name}.png") as file:
            picture.savefig(file, format="png", dpi=150)
