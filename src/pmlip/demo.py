"""The demo: CHGNet learns on a few DFT structures how large its own errors are."""

import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.io import read
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pmlip import metrics, scores
from pmlip.backbones import load_backbone
from pmlip.model import Potential, perturb
from pmlip.samples import Samples
from pmlip.structures import labels
from pmlip.training import FinetuneConfig, finetune

TRAINING = 16  # of the mildly distorted structures; the rest of them are the test
BATCH, SAMPLES = 4, 4
TEST_SAMPLES = 32
LEARNING_RATE = 1e-2


def quartz() -> dict[str, list[Atoms]]:
    """Distorted alpha-quartz with PBE labels (see datasets/silica_pbe): training, test, and strong distortions."""
    with resources.as_file(resources.files("pmlip") / "data" / "quartz_pbe.extxyz") as file:
        structures = read(file, index=":")
    mild = [atoms for atoms in structures if atoms.info["kind"] == "mild"]
    strong = [atoms for atoms in structures if atoms.info["kind"] == "strong"]
    return {"train": mild[:TRAINING], "test": mild[TRAINING:], "strong": strong}


def run(out: Path, *, steps: int, seed: int, console: Console) -> None:
    data = quartz()
    model = perturb(load_backbone("chgnet"))
    console.print(
        f"CHGNet 0.3.0, {len(model.sites)} sites of noise. Its own weights stay as they are; the noise learns from "
        f"{len(data['train'])} quartz structures with PBE forces."
    )
    train_noise(model, data["train"], steps=steps, seed=seed, console=console)

    tests = {"as in training": data["test"], "stronger distortions": data["strong"]}
    table = Table(title=f"Forces on structures not trained on, K = {TEST_SAMPLES} samples, meV/Å")
    for column in ("", "MAE", "CRPS", "spread", "RMSE", "SSR", "Spearman", "|F| alone"):
        table.add_column(column, justify="right")
    points = {}
    for name, structures in tests.items():
        samples = model.sample(structures, samples=TEST_SAMPLES, seed=seed)
        row, points[name] = judge(samples, labels(structures).forces)
        table.add_row(name, *row)
    console.print(table)
    console.print(
        "MAE, RMSE: errors of the sample mean. CRPS: error of the whole distribution; without a spread it would be the "
        "MAE. SSR: spread over RMSE, right at this K; 1 is calibrated, below 1 over-confident. Spearman: how well the "
        "spread of an atom ranks its error; |F| alone: how well the size of its force does."
    )
    out.mkdir(parents=True, exist_ok=True)
    plot(points, out / "spread-and-error.png")
    model.save(out / "p-chgnet.pt")
    console.print(f"picture: {out / 'spread-and-error.png'}\nmodel:   {out / 'p-chgnet.pt'}")


def train_noise(model: Potential, structures: list[Atoms], *, steps: int, seed: int, console: Console) -> None:
    """Train W_z and the noise weights on the fair CRPS of the forces."""
    config = FinetuneConfig(
        epochs=math.ceil(steps * BATCH / len(structures)),
        batch=BATCH,
        samples=SAMPLES,
        noise_rate=LEARNING_RATE,
        energy=0.0,
        stress=0.0,
        offsets=False,
        freeze_backbone=True,
        seed=seed,
    )
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )
    with bar:
        task = bar.add_task("training", total=steps)

        def show(step: int, steps: int, latest: Mapping[str, float]) -> None:
            crps = f", CRPS {1e3 * latest['train_forces']:.0f} meV/Å" if latest else ""
            bar.update(task, completed=step, total=steps, description=f"training{crps}")

        finetune(model, structures, config=config, progress=show)


def judge(samples: Samples, target: torch.Tensor) -> tuple[list[str], tuple[np.ndarray, np.ndarray]]:
    """A row of the table, and (spread, error) of each atom in eV/Å."""
    mean, spread = samples.mean.forces.double(), samples.spread.forces.double()
    error = mean - target
    atom_error, atom_spread = error.norm(dim=-1).numpy(), spread.norm(dim=-1).numpy()
    in_meV = [
        error.abs().mean(),
        scores.fair_crps(samples.forces.double(), target).mean(),
        spread.square().mean().sqrt(),
        error.square().mean().sqrt(),
    ]
    ratios = [
        metrics.spread_skill_ratio(mean, spread, target, samples.count),
        metrics.spearman(atom_error, atom_spread),
        metrics.spearman(atom_error, target.norm(dim=-1)),
    ]
    return [f"{1e3 * x:.0f}" for x in in_meV] + [f"{x:.2f}" for x in ratios], (atom_spread, atom_error)


def plot(points: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Error against spread, atom by atom, with root mean squares in bins of equal count."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("the picture needs: pip install 'pmlip[report]'") from missing
    figure = Figure(figsize=(6, 5.2), layout="constrained")
    axes = figure.add_subplot()
    for (name, (spread, error)), color in zip(points.items(), ("tab:blue", "tab:orange"), strict=True):
        axes.scatter(spread, error, s=10, alpha=0.3, color=color, edgecolors="none")
        bins = np.array_split(np.argsort(spread), 6)
        means = [[np.sqrt((values[part] ** 2).mean()) for part in bins] for values in (spread, error)]
        axes.plot(*means, "o-", color=color, label=f"{name}: rms in bins of equal count")
    everything = np.concatenate([values for pair in points.values() for values in pair])
    ends = [0.8 * everything.min(), 1.25 * everything.max()]
    axes.plot(ends, ends, "k--", lw=1, label="spread = error")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="spread of the force on an atom (eV/Å)",
        ylabel="error of the force on an atom (eV/Å)",
        title="CHGNet on quartz: does it know where it is wrong?",
    )
    axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=150)
