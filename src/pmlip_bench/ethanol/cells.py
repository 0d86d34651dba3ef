"""Runs the cells of the ethanol benchmark: training and evaluation of one method with one seed."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from rich.console import Console
from scipy.interpolate import make_interp_spline
from torch import Tensor

from pmlip import methods, metrics
from pmlip.backbones import load_backbone
from pmlip.calibration import calibrate
from pmlip.evaluation import Evaluation, as_record, compare, evaluate
from pmlip.methods import Method
from pmlip.methods.base import FIXED_ATOMS
from pmlip.provenance import environment
from pmlip.samples import mean_per_system
from pmlip.scores import fair_crps
from pmlip_bench.ethanol.data import MD, PAIRS, PATH, EthanolSettings, Splits, splits
from pmlip_bench.ethanol.tables import figure, summary, table
from pmlip_bench.finetuned import fine_tuned, training_cost
from pmlip_bench.publish import check_installed, publish
from pmlip_bench.runner import Cell, check_settings, read_cells, run_cells, settings_of

BACKBONE = "chgnet"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def run(
    settings: EthanolSettings,
    *,
    names: Sequence[str],
    seeds: int,
    folder: Path,
    jobs: int,
    console: Console,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Run the unfinished cells, write the table and the picture of all finished cells, and return the table's rows."""
    check_installed()
    for name in names:
        if methods.built_from(name):
            raise ValueError(f"{name} is built from other models; this benchmark runs methods that are trained")
    described = _described(settings, splits(settings))
    for cell, result in read_cells(folder).items():
        file = cell.file(folder)
        check_settings(file, settings_of(file, result), described)
    cells = [Cell(name, settings.train, seed) for name in names for seed in range(seeds)]
    job = partial(work, settings=settings, folder=folder, device=device)
    try:
        run_cells(cells, job, folder, jobs=jobs, console=console)
    finally:  # also when a cell failed: show the finished cells
        rows = publish(folder, table=table, summary=summary, figure=figure, figure_name="path.png", console=console)
    return rows


def work(cell: Cell, *, settings: EthanolSettings, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Train the model of a cell, or read its weights, and return its scores."""
    data = splits(settings)
    model = _fine_tuned(cell, data, settings, folder, device)
    # not stored with the weights, so that another evaluation of the same weights uses the methods as they are then
    if model.learner().calibrated_after:
        calibrate(model, data.valid, chunk_atoms=FIXED_ATOMS)
    model.fit_novelty(data.train, valid=data.valid)
    inside = evaluate(model, data.test, samples=settings.test_samples)
    outside = {
        name: evaluate(model, structures, samples=settings.test_samples) for name, structures in data.unseen.items()
    }
    trained = _oh_distances(data.train)
    return {
        "cell": asdict(cell),
        "sets": {
            MD: _scores(inside, data.train),
            **{name: _scores(found, data.train) | compare(inside, found) for name, found in outside.items()},
        },
        "path": {"trained": [trained.min(), trained.max()], **along_the_bond(outside[PATH])},
        "pairs_inside": pairs_inside(outside[PAIRS]),
        "calibration": None if model.calibration is None else asdict(model.calibration),
        "training": training_cost(model),
        "settings": _described(settings, data),
        **environment(),
    }


def _described(settings: EthanolSettings, data: Splits) -> dict[str, Any]:
    """The settings as stored in the result file; a hash of the structures instead of the folder."""
    content = asdict(settings) | {"data": f"{data.training_hash}-{data.test_hash}"}
    read_back: dict[str, Any] = json.loads(json.dumps(content))
    return read_back


def _fine_tuned(cell: Cell, data: Splits, settings: EthanolSettings, folder: Path, device: str) -> Method:
    """The fine-tuned model of a cell; its weights stay valid when only the evaluation changes."""
    return fine_tuned(
        cell,
        folder,
        method=cell.method,
        backbone=load_backbone(BACKBONE, device=device),
        train=data.train,
        valid=data.valid,
        config=settings.config,
        settings={"config": asdict(settings.config), "structures": data.training_hash},
        device=device,
    )


def _scores(found: Evaluation, train: Sequence[Atoms]) -> dict[str, Any]:
    """Scores of one set of structures, and quantiles of its novelty.

    Energies of another composition than ethanol are left out. The energy offsets of the elements are fitted to ethanol
    alone, which determines only their sum over the molecule.
    """
    record = as_record(found)
    record["novelty"] = {str(q): _finite(np.quantile(found.structure_novelty, q)) for q in QUANTILES}
    if {atoms.get_chemical_formula() for atoms in found.listed} == {train[0].get_chemical_formula()}:
        record["relative_energy"] = _energy_scores(found)
    else:
        record.pop("energy", None)
    return record


def _energy_scores(found: Evaluation) -> dict[str, float]:
    """Scores of relative energies, also of the structures inside and outside the training set alone."""
    assert found.novelty is not None
    energies, energy = relative_energies(found)
    counts = torch.arange(len(energy)) != int(energy.argmin())  # the reference has no error and no spread
    scores = _error_scores(energies[:, counts], energy[counts])
    error, outside = (energies.mean(0) - energy).abs()[counts], found.novelty.outside[counts]
    parts = {"mae_inside": error[~outside], "mae_outside": error[outside]}
    return scores | {name: float(part.mean()) for name, part in parts.items() if len(part)}


def _finite(novelty: float) -> float | None:
    """None for infinite novelty, which JSON lacks; `rankable` replaces infinity by the largest number."""
    return None if novelty > 1e300 else float(novelty)


def relative_energies(found: Evaluation) -> tuple[Tensor, Tensor]:
    """Samples (sample, system) and labels (system,) of the energy relative to the structure with the lowest label.

    In eV per structure. The difference is taken within each sample.
    """
    label = found.target.energy.double()
    lowest = int(label.argmin())
    drawn = found.drawn.energy.double()
    return drawn - drawn[:, lowest, None], label - label[lowest]


def _error_scores(drawn: Tensor, label: Tensor) -> dict[str, float]:
    """MAE and CRPS of samples (sample, entry); with several samples, also their spread-skill ratio."""
    scores = {
        "mae": float((drawn.mean(0) - label).abs().mean()),
        "crps": float(fair_crps(drawn, label).mean()),
    }
    if len(drawn) > 1:
        scores["ssr"] = metrics.spread_skill_ratio(drawn.mean(0), drawn.std(0), label, len(drawn))
    return scores


def along_the_bond(found: Evaluation) -> dict[str, Any]:
    """Scores and one record per structure of the path on which one hydrogen moves away from the oxygen.

    The set has no forces. The force on the hydrogen along the bond is the derivative of the DFT energy along the path,
    from a spline of degree 5 through the energies.
    """
    assert found.novelty is not None
    structures = list(found.listed)
    distance = _oh_distances(structures)
    positions = np.stack([atoms.positions for atoms in structures])
    hydrogen = int(np.ptp(positions, axis=0).sum(1).argmax())
    bond = positions[:, hydrogen] - positions[:, structures[0].symbols.search("O")[0]]
    direction = torch.from_numpy(bond / np.linalg.norm(bond, axis=1, keepdims=True))

    def component(forces: Tensor) -> Tensor:
        """Force on the hydrogen along the bond, (..., frame), of forces (..., atom, 3)."""
        own: Tensor = forces.double().unflatten(-2, positions.shape[:2])[..., hydrogen, :]
        return (own * direction).sum(-1)

    force = torch.from_numpy(true_force(distance, found.target.energy.numpy()))
    drawn, point = component(found.drawn.forces), component(found.point.forces)
    energies, energy = relative_energies(found)
    sigma, system = found.novelty.sigma, found.drawn.system
    error_bar = sigma.unflatten(0, positions.shape[:2])[:, hydrogen]
    columns = {
        "oh_distance": torch.from_numpy(distance),
        "force": force,
        "force_error": drawn.mean(0) - force,
        "force_error_without_noise": point - force,
        "one_pass_error_bar": error_bar,
        "structure_one_pass_error_bar": mean_per_system(sigma.square()[:, None], system, len(structures)).sqrt(),
        "novelty": found.novelty.structure,
        "hydrogen_novelty": found.novelty.atom.unflatten(0, positions.shape[:2])[:, hydrogen],
        "energy": energy,
        "energy_error": energies.mean(0) - energy,
    }
    if found.samples > 1:
        columns |= {
            "force_spread": drawn.std(0),
            "structure_force_spread": torch.from_numpy(found.spread),
            "energy_spread": energies.std(0),
        }
    scores = _error_scores(drawn, force)
    scores["ssr_one_pass"] = math.sqrt(float(error_bar.square().mean() / (point - force).square().mean()))
    rows = {name: values.tolist() for name, values in columns.items()}
    frames = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    return {"scores": scores, "frames": frames}


def pairs_inside(found: Evaluation) -> dict[str, float]:
    """The smallest distance in Å at which novelty calls a pair of atoms inside the training set, for each formula."""
    assert found.novelty is not None
    distances: dict[str, float] = {}
    for atoms, outside in zip(found.listed, found.novelty.outside.tolist(), strict=True):
        formula, distance = atoms.get_chemical_formula(), float(atoms.get_distance(0, 1))
        if not outside:
            distances[formula] = min(distance, distances.get(formula, math.inf))
    return distances


def true_force(distance: np.ndarray, energy: np.ndarray) -> np.ndarray:
    """-dE/dr at each distance."""
    slope: np.ndarray = make_interp_spline(distance, energy, k=5).derivative()(distance)
    return -slope


def _oh_distances(structures: Sequence[Atoms]) -> np.ndarray:
    """Length of the O-H bond of the hydroxyl group, as the files give it, in Å."""
    return np.array([float(atoms.info["OH_dist"]) for atoms in structures])
