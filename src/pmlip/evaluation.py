"""How good a model and its uncertainty are on structures with labels."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms

from pmlip import metrics, scores
from pmlip.methods.base import Method, Progress
from pmlip.samples import SMALLEST_SPREAD, Outputs, Samples, mean_per_system
from pmlip.structures import LABELS
from pmlip.structures.atoms import as_structures
from pmlip.structures.labels import labels


@dataclass(frozen=True)
class Evaluation:
    """Scores by output, in eV and Å; energies per atom. `spread` and `error` are those of each structure's forces."""

    samples: int
    structures: int
    scores: dict[str, dict[str, float]]  # output -> name -> value
    seconds: float  # of the K samples
    spread: np.ndarray  # (structure,) root mean square spread of the force components
    error: np.ndarray  # (structure,) root mean square error of the force components
    drawn: Samples = field(repr=False)
    expected: Outputs = field(repr=False)  # the mean over all noise as far as it can be told
    point: Outputs = field(repr=False)  # the prediction without noise
    target: Outputs = field(repr=False)
    listed: Sequence[Atoms] = field(default=(), repr=False)  # the structures

    def write_report(self, path: str | Path, *, unseen: Mapping[str, "Evaluation"] | None = None) -> None:
        """One HTML file to look at; unseen: what the model says of other structures, by what they are called."""
        from pmlip.report import Judged, write_report  # which needs more than an evaluation does

        outside = [Judged("model", name, evaluation) for name, evaluation in (unseen or {}).items()]
        write_report(path, [Judged("model", "structures", self)], outside)

    def subset(self, samples: int) -> "Evaluation":
        """The same with the first so many samples, of which nothing but their mean is known."""
        drawn = self.drawn.subset(samples)
        return _judged(drawn, drawn.mean, self.point, self.target, self.seconds, self.listed)

    def scaled(self, factor: float, *, energy: float | None = None) -> "Evaluation":
        """The same with the spread times this factor, about the mean; energy: a factor of its own for the energies."""
        drawn = self.drawn.scaled(factor, energy=energy)
        scaled = _judged(drawn, self.expected, self.point, self.target, self.seconds, self.listed)
        for name, scored in scaled.scores.items():  # what is scaled about the mean of few samples has no fair score
            own = energy if name == "energy" and energy is not None else factor
            values, label = _entries(name, self.drawn, self.target)
            present = label.isfinite() & values.isfinite().all(0)
            scored["crps"] = float(scores.fair_crps_of_scaled(values[:, present], label[present], own).mean())
        return scaled


def evaluate(
    model: Method,
    structures: Sequence[Atoms],
    *,
    samples: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Scores of the samples, of their mean, of the mean over all noise (`Method.sample_with_mean`), and without noise.

    Every score is over the entries whose label is there. With one sample there is no spread to score.
    """
    listed = as_structures(structures)
    target = labels(listed)
    if not any(bool(values.isfinite().any()) for values in target.values()):
        raise ValueError("the structures carry no labels to compare with; Atoms.copy() leaves labels behind")
    count = model.fixed_samples or samples
    began = time.perf_counter()
    drawn, expected = model.sample_with_mean(listed, samples=count, seed=seed, progress=progress)
    seconds = time.perf_counter() - began
    return _judged(drawn, expected, model.predict(listed), target, seconds, listed)


def _judged(
    drawn: Samples,
    expected: Outputs,
    point: Outputs,
    target: Outputs,
    seconds: float,
    listed: Sequence[Atoms],
) -> Evaluation:
    result = {}
    for name in LABELS:
        if name in drawn and bool(target[name].isfinite().any()):
            result[name] = _scores(name, drawn, expected, point, target)
    has_spread = drawn.count > 1 and drawn.trained
    squares = (drawn.mean.forces.double() - target.forces).square()
    variance = drawn.spread.forces.double().square() if has_spread else torch.zeros_like(squares)
    error, spread = (
        mean_per_system(values, drawn.system, drawn.systems).sqrt().numpy() for values in (squares, variance)
    )
    return Evaluation(
        drawn.count, drawn.systems, result, seconds, spread, error, drawn, expected, point, target, listed
    )


def _entries(name: str, values: Outputs | Samples, target: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
    """An output and its label, in double precision; energies per atom."""
    unit = target.atoms_per_system if name == "energy" else 1
    return values[name].double() / unit, target[name].double() / unit


def _scores(name: str, drawn: Samples, expected: Outputs, point: Outputs, target: Outputs) -> dict[str, float]:
    values, label = _entries(name, drawn, target)
    mean = values.mean(0)
    present = label.isfinite() & mean.isfinite()
    others = {"expected": expected, "without_noise": point}
    result = {
        "mae": float((mean - label)[present].abs().mean()),
        **{
            f"mae_{title}": float((_entries(name, answer, target)[0] - label)[present].abs().mean())
            for title, answer in others.items()
        },
        "rmse": float((mean - label)[present].square().mean().sqrt()),
        "crps": float(scores.fair_crps(values[:, present], label[present]).mean()),
    }
    if drawn.count < 2 or not drawn.trained:
        return result
    spread = values.std(0)
    chosen = (mean[present], spread[present], label[present], drawn.count)
    result["spread"] = float(spread[present].square().mean().sqrt())
    if result["rmse"] > 0:  # symmetry can make all forces zero, and then there is nothing to compare or to rank
        result["ssr"] = metrics.spread_skill_ratio(*chosen)
    moving = present & (spread > (SMALLEST_SPREAD if name == "forces" else 0))
    if bool(moving.any()):
        result["coverage_95"] = metrics.coverage(mean[moving], spread[moving], label[moving], drawn.count)
    if name == "forces" and bool(present.all()):
        result |= _ranking(mean, spread, label, drawn.system)
        if "spearman_structure" in result and drawn.count > 3:
            result["spearman_structure_at_best"] = _ranking_at_best(values, drawn.system)
        if bool(moving.any()):
            result["directions"] = metrics.effective_directions(values, drawn.system)
    return {name: value for name, value in result.items() if math.isfinite(value)}  # what has no value is not there


def _ranking(mean: torch.Tensor, spread: torch.Tensor, label: torch.Tensor, system: torch.Tensor) -> dict[str, float]:
    """How well the spread ranks errors, per structure and per atom, beside what |F| alone does."""
    result = {}
    per_atom = [x.square().mean(-1, keepdim=True) for x in (mean - label, spread, mean)]
    per_structure = [mean_per_system(x, system, int(system[-1]) + 1) for x in per_atom]
    for level, (error, variance, force) in {"structure": per_structure, "atom": per_atom}.items():
        if len(error) > 2:
            result[f"spearman_{level}"] = metrics.spearman(error, variance)
            result[f"spearman_{level}_of_force"] = metrics.spearman(error, force)
            result[f"spearman_{level}_given_force"] = metrics.partial_spearman(error, variance, force)
    return result


def _ranking_at_best(samples: torch.Tensor, system: torch.Tensor) -> float:
    """What the correlation of the structures would be if the spread were right: each sample in turn as the truth.

    Errors scatter around any spread, and where all structures have nearly the same one, none can rank them well.
    """
    count, total, squares = len(samples), samples.sum(0), samples.square().sum(0)
    found = []
    for truth in samples:
        mean = (total - truth) / (count - 1)
        variance = (squares - truth.square() - (count - 1) * mean.square()) / (count - 2)
        error, spread = (mean_per_system(x, system, int(system[-1]) + 1) for x in ((mean - truth).square(), variance))
        found.append(metrics.spearman(error, spread))
    return float(np.mean(found))


def compare(inside: Evaluation, outside: Evaluation) -> dict[str, float]:
    """Does the spread rise where the error does? In- against out-of-distribution structures."""
    return {
        "auroc_spread": metrics.auroc(inside.spread, outside.spread),
        "auroc_force": metrics.auroc(_force(inside), _force(outside)),  # what one knows without a spread
        "auroc_error": metrics.auroc(inside.error, outside.error),
        "spread_ratio": float(np.sqrt((outside.spread**2).mean() / (inside.spread**2).mean())),
        "error_ratio": float(np.sqrt((outside.error**2).mean() / (inside.error**2).mean())),
    }


def rank_together(parts: Sequence[Evaluation]) -> dict[str, float]:
    """How well the spread ranks the errors of the structures of several sets, beside what |F| alone does."""
    error, spread, force = (
        np.concatenate(values)
        for values in zip(*((part.error, part.spread, _force(part)) for part in parts), strict=True)
    )
    return {"spearman": metrics.spearman(error, spread), "spearman_of_force": metrics.spearman(error, force)}


def _force(evaluation: Evaluation) -> np.ndarray:
    """The mean square of each structure's predicted forces."""
    squares = evaluation.drawn.mean.forces.double().square()
    size: np.ndarray = mean_per_system(squares, evaluation.drawn.system, evaluation.structures).numpy()
    return size


def as_record(evaluation: Evaluation) -> dict[str, Any]:
    """What a result file holds."""
    return {
        "samples": evaluation.samples,
        "structures": evaluation.structures,
        "seconds": round(evaluation.seconds, 2),
        **evaluation.scores,
    }
