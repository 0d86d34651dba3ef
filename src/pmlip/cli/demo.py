"""pmlip demo: CHGNet fine-tuned on the silica data included in pmlip, and its spread compared with its error."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pmlip.cli.options import AsJson, print_json
from pmlip.cli.progress import resumable
from pmlip.locks import locked_folder

if TYPE_CHECKING:
    from pmlip.evaluation import Evaluation
    from pmlip.methods.p import Potential

TRAINING, VALIDATION, TESTED = 48, 20, 12  # structures; the last number is of each test set
TEST_SAMPLES = 16
PREDICTION_PASSES = 3 * (TEST_SAMPLES + 2)  # of a structure; for the estimate of the time left
SHOWN = ("mae_expected", "crps", "ssr", "spearman_atom", "spearman_atom_of_force")  # scores
STEP_COST = 2.5  # cost of a pass with gradients, relative to one without; for the estimate of the time left
TESTS = {
    "test": "the test set",
    "hot": "1500 to 3000 K",
    "strained": "strained to 8 %",
    "polymorph": "other polymorphs",
}


def demo(
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps; fewer are faster and give a less accurate model.")
    ] = 150,
    seed: Annotated[int, typer.Option(min=0, help="Seed of training and sampling.")] = 0,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the report, figures and model; an interrupted demo continues from it.",
            rich_help_panel="Output",
        ),
    ] = Path("pmlip-demo"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune CHGNet on the silica data included in pmlip, and compare its spread with its error.

    Example: pmlip demo --steps 100
    """
    from pmlip import datasets
    from pmlip.backbones import load_backbone
    from pmlip.calibration import calibrate
    from pmlip.cli.score_table import force_table, legend
    from pmlip.evaluation import as_record, evaluate
    from pmlip.methods.p import perturb
    from pmlip.report import check_installed
    from pmlip.report.entry import Entry
    from pmlip.report.verdicts import headline
    from pmlip.structures.atoms import subsample
    from pmlip.structures.labels import labels
    from pmlip.tangent import passes_of_fit
    from pmlip.training.config import FinetuneConfig
    from pmlip.training.finetuning import finetune

    console = Console(quiet=as_json)
    check_installed()
    train, valid = datasets.silica_pbe("train")[:TRAINING], datasets.silica_pbe("valid")[:VALIDATION]
    tests = {name: subsample(datasets.silica_pbe(name), TESTED) for name in TESTS}
    model = perturb(load_backbone("chgnet"))
    console.print(
        f"CHGNet 0.3.0 with noise at {len(model.sites)} sites is fine-tuned on {len(train)} structures of quartz and "
        f"cristobalite with PBE energies, forces and stress. It then predicts {sum(map(len, tests.values()))} other "
        f"structures with {TEST_SAMPLES} samples each."
    )
    before = float((model.predict(tests["test"]).forces - labels(tests["test"]).forces).abs().mean())
    config = FinetuneConfig(steps=steps, seed=seed)
    passes = STEP_COST * steps * config.batch * (config.samples + 1)  # and one pass without noise
    passes += config.validations * len(valid) * config.validation_samples
    fitting = STEP_COST * passes_of_fit(len(train))
    calibrating = 4 * PREDICTION_PASSES * len(valid)
    work = [passes + fitting + calibrating, *(PREDICTION_PASSES * len(structures) for structures in tests.values())]
    with locked_folder(out), _bar(console) as bar:
        task = bar.add_task("fine-tuning", total=sum(work))

        def trained(step: int, steps: int, latest: Mapping[str, float]) -> None:
            crps = f", CRPS of forces {1e3 * latest['train_forces']:.0f} meV/Å" if latest else ""
            bar.update(task, completed=passes * step / steps, description=f"fine-tuning{crps}")

        def fitted(count: int, total: int) -> None:
            done = passes + fitting * count / total
            bar.update(task, completed=done, description="finding the directions that the training set leaves open")

        with resumable(console):
            finetune(model, train, valid=valid, config=config, folder=out / "run", progress=trained, fitting=fitted)
        bar.update(task, description="calibrating the spread")
        scaled = calibrate(model, valid, samples=TEST_SAMPLES, seed=seed)
        bar.update(task, description="comparing with the training set")
        model.fit_novelty(train, valid=valid)
        evaluations: dict[str, Evaluation] = {}  # by what the structures are called
        for number, (name, structures) in enumerate(tests.items()):
            done = sum(work[: number + 1])
            bar.update(task, completed=done, description=f"predicting: {TESTS[name]}")

            def asked(count: int, total: int | None, done: float = done) -> None:
                bar.update(task, completed=done + PREDICTION_PASSES * count)

            evaluations[TESTS[name]] = evaluate(model, structures, samples=TEST_SAMPLES, seed=seed, progress=asked)
        bar.update(task, completed=sum(work), description="done")
    title = f"Forces on structures outside the training set, K = {TEST_SAMPLES} samples, meV/Å"
    console.print(force_table(title, evaluations, SHOWN))
    console.print(
        f"Before fine-tuning, the MAE on the structures of the first row was {1e3 * before:.0f} meV/Å. After it, the "
        f"spread was multiplied by {scaled.factor:.2f}, fitted to {scaled.structures} validation structures.\n"
        + legend("CRPS", "SSR", "Spearman", "|F| alone", "AUROC", "outside")
    )
    _write(out, model, evaluations)
    console.print(f"report and figures: {out / 'report.html'}, {out / 'spread-and-error.png'}, {out / 'unseen.png'}")
    console.print(f"model: {out / 'p-chgnet.pt'}")
    first, *others = (Entry("P-CHGNet", name, evaluation) for name, evaluation in evaluations.items())
    console.print(headline(first, others)[1], style="bold", markup=False, highlight=False)
    scores = {name: as_record(evaluations[called]) for name, called in TESTS.items()}
    print_json({"force_mae_before": before, **scores}, as_json)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # training and prediction differ in speed, so the estimate averages over a long time
    return Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=120)


def _write(out: Path, model: "Potential", evaluations: "Mapping[str, Evaluation]") -> None:
    """Write the trained model, the report, and its two most informative figures."""
    from pmlip.atomic_files import atomic_write
    from pmlip.report import plots, write_report

    model.save(out / "p-chgnet.pt")
    (first, inside), *others = evaluations.items()
    write_report(out / "report.html", {"P-CHGNet": inside}, data=first, unseen=dict(others))
    atoms = {name: evaluation.columns["forces"].varying_atoms for name, evaluation in evaluations.items()}
    figures = {
        "spread-and-error": plots.spread_and_error(
            {name: (rows["spread"], rows["error"]) for name, rows in atoms.items()}
        ),
        "unseen": plots.inside_and_outside(
            {name: evaluation.structure_novelty for name, evaluation in evaluations.items()},
            {name: evaluation.error for name, evaluation in evaluations.items()},
            novelty=True,
        ),
    }
    for name, figure in figures.items():
        with atomic_write(out / f"{name}.png") as file:
            figure.savefig(file, format="png", dpi=150)
