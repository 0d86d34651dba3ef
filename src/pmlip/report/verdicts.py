"""What the figures mean for these models, in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pmlip import metrics
from pmlip.evaluation import compare
from pmlip.report.judged import Judged
from pmlip.scores import gaussian_crps
from pmlip.spread_fit import best_width

FAR = 0.03  # a share outside the 95 % interval that differs by this much from 5 % is worth a word
OFFSET = 0.5  # eV/atom; a larger error of the energies is a constant that was not fitted


def sentences(inside: Sequence[Judged], unseen: Sequence[Judged], records: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the figures mean for these models: a verdict (good, fair, bad) and a sentence each.

    records: how each model was made, by its name.
    """
    said = []
    for judged in inside:
        who = f"{judged.model}: " if len(inside) > 1 else ""
        promised = _promise(judged, records.get(judged.model, {}).get("calibration", {}))
        for verdict, text in (*_calibration(judged), *promised, *_worth(judged), *_ranking(judged), *_constant(judged)):
            said.append({"verdict": verdict, "text": who + text})
    for judged in unseen:
        said += [{"verdict": verdict, "text": text} for verdict, text in _outside(inside[0], judged)]
    return said


def _calibration(judged: Judged) -> list[tuple[str, str]]:
    forces = judged.forces
    outside = 1 - float(forces.covered.mean())
    start = f"Errors of the forces leave the 95 % interval in {100 * outside:.0f} % of cases (5 % would be right)"
    if abs(outside - 0.05) <= FAR:
        return [("good", f"{start}: calibrated.")]
    name = "over-confident" if outside > 0.05 else "under-confident"
    verdict = "bad" if outside > 0.15 else "fair"
    best, covering = forces.best_factor, forces.covering_factor
    if best is None:
        return [(verdict, f"{start}: {name}.")]
    if abs(np.log(best / covering)) < np.log(1.25):
        return [(verdict, f"{start}: {name}; a factor of {best:.2f} on the spread mends it.")]
    tails = "a few errors are far larger than" if covering > best else "most errors are smaller than"
    return [
        (
            verdict,
            f"{start}: {name}, and no one factor mends it: the CRPS is best with {best:.2f}, the interval is right "
            f"with {covering:.2f}; {tails} the spread tells.",
        )
    ]


def _promise(judged: Judged, calibration: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Is what the conformal interval of a calibration promises kept here?"""
    factor, level = calibration.get("conformal"), calibration.get("level")
    if factor is None or level is None:
        return []
    forces = judged.forces
    sigma = metrics.predictive_sigma(forces.spread, len(forces.samples))
    held = (np.abs(forces.expected - forces.target) <= factor * sigma) | ~forces.moving
    inside, data = float(held.mean()), calibration.get("data", "validation data")
    text = (
        f"The interval of its calibration on {data}, mean ± {factor:.2f} sigma, holds "
        f"{100 * inside:.0f} % of the force components here; {100 * level:.0f} % were promised for structures like "
        f"those, with K = {calibration['samples']}."
    )
    return [("good" if inside >= level - FAR else "bad", text)]


def _constant(judged: Judged) -> list[tuple[str, str]]:
    """A constant in the energies is no fault of a potential, but of its references."""
    energy = judged.evaluation.scores.get("energy")
    if energy is None or energy["mae_expected"] < OFFSET:
        return []
    question = "were energies per element fitted to these data, as pmlip finetune does?"
    return [("bad", f"Energies are off by {energy['mae_expected']:.2f} eV/atom: {question}")]


def _worth(judged: Judged) -> list[tuple[str, str]]:
    """Is the learned spread better than two trivial ones around the same mean?"""
    forces = judged.forces
    error = (forces.mean - forces.target).ravel()
    # the fair CRPS is that of infinitely many samples; so the rivals are put around the mean of as many
    sampling = float((forces.spread**2).mean()) / len(forces.samples)
    error = error * np.sqrt(max(1 - sampling / float((error**2).mean()), 0.0))
    own = 1e3 * float(forces.crps.mean())
    size = np.repeat(forces.atom_force, 3)
    constant, scaled = (
        1e3 * float(gaussian_crps(error, best_width(error, unit) * unit).mean()) for unit in (np.ones_like(size), size)
    )
    best = min(constant, scaled)
    text = (
        f"As a distribution the forces score {own:.1f} meV/Å (CRPS). Around the same mean one constant width, chosen "
        f"with these labels in hand, would score {constant:.1f}, a width proportional to |F| {scaled:.1f}: the learned "
        f"spread is {'better' if own < best else 'worse'} by {abs(100 * (1 - own / best)):.0f} %."
    )
    return [("good" if own < 0.98 * best else "fair" if own < 1.02 * best else "bad", text)]


def _ranking(judged: Judged) -> list[tuple[str, str]]:
    forces = judged.forces
    own = metrics.spearman(forces.atom_error, forces.atom_spread)
    trivial = metrics.spearman(forces.atom_error, forces.atom_force)
    beyond = metrics.partial_spearman(forces.atom_error, forces.atom_spread, forces.atom_force)
    if not np.isfinite([own, trivial, beyond]).all():  # too few atoms, or all alike
        return []
    text = (
        f"The spread ranks atoms by their error with a correlation of {own:.2f} (Spearman); the size of the force "
        f"alone reaches {trivial:.2f}. Given |F|, {beyond:.2f} is left: "
    )
    if beyond > 0.2:
        return [("good", text + "it knows more than that large forces have large errors.")]
    if beyond > 0.05:
        return [("fair", text + "it knows little more than that large forces have large errors.")]
    return [("bad", text + "it knows no more than that large forces have large errors.")]


def _outside(inside: Judged, outside: Judged) -> list[tuple[str, str]]:
    if not outside.forces.moving.any():
        return [("fair", f"On {outside.data} symmetry fixes all forces: they say nothing about the model.")]
    against = compare(inside.evaluation, outside.evaluation)
    error, spread = against["error_ratio"], against["spread_ratio"]
    text = (
        f"On {outside.data} the errors are {error:.2f} times those on {inside.data}, the spread {spread:.2f} times; "
        f"the spread tells the two apart with AUROC {against['auroc_spread']:.2f} (0.5 is chance, "
        f"the size of the forces alone gives {against['auroc_force']:.2f}). "
    )
    if error < 1.1:
        return [("good", text + "The model is as good there.")]
    if spread > 0.8 * error:
        return [("good", text + "It notices.")]
    if spread > 1.1:
        return [("fair", text + "It notices, but not how much: the spread is too small there.")]
    return [("bad", text + "It does not notice: do not rely on the spread there.")]
