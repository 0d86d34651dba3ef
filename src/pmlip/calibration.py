"""Calibration on validation data: one factor on the spread, and conformal intervals with guaranteed coverage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ase import Atoms
from torch import Tensor

from pmlip import metrics
from pmlip.methods._tangents import scale_parts
from pmlip.methods.base import Method
from pmlip.provenance import Calibration
from pmlip.samples import SMALLEST_SPREAD, Outputs, Samples
from pmlip.scores import fair_crps
from pmlip.spread_fit import LEVEL, SMALLEST, best_factor, check_count, check_level, conformal_factor
from pmlip.structures.atoms import Progress, as_structures
from pmlip.structures.labels import labels, require_labels

ROUNDS = 5  # largest number of fits
CLOSE = 0.01  # stop if the next factor differs from 1 by less


@dataclass(frozen=True)
class _Round:
    """Results with the noise scaled by a factor."""

    factor: float
    crps: float
    ssr: float
    energy: Tensor  # (structure,) mean over all noise, eV per atom
    forces: Tensor  # (atom, 3) mean over all noise
    spread: Tensor  # (atom, 3) of the forces

    @classmethod
    def of(cls, factor: float, drawn: Samples, expected: Outputs, target: Tensor) -> "_Round":
        mean, spread = drawn.mean.forces.double(), drawn.spread.forces.double()
        return cls(
            factor,
            float(fair_crps(drawn.forces.double(), target).mean()),
            metrics.spread_skill_ratio(mean, spread, target, drawn.count),
            expected.energy.double() / drawn.atoms_per_system,
            expected.forces.double(),
            spread,
        )


def calibrate(
    model: Method,
    valid: Sequence[Atoms],
    *,
    samples: int = 16,
    seed: int = 0,
    level: float = LEVEL,
    data: str | None = None,
    chunk_atoms: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Scale the spread of a model in place by the factor with the smallest force CRPS on these structures.

    The factor acts on the noise (or on the width of a Gaussian), so each sample remains a potential, and energies,
    forces and stress share one factor. The response to noise is not exactly linear, so the factor is fitted again after
    each change, and the best factor is kept. A constant is added to the energies to keep their mean unchanged, unless
    the model was trained with offsets=False.

    data: name of the structures, stored in the calibration. chunk_atoms: as in `Method.sample`.
    """
    listed = as_structures(valid)
    count = model.spread_samples(samples)
    check_count(count)
    check_level(level)
    require_labels(listed, ["forces"])
    model.scale_spread(1.0)  # raises now if the spread cannot be scaled
    target = labels(listed).forces
    scale_parts(model, listed, samples=count, chunk_atoms=chunk_atoms)
    rounds: list[_Round] = []
    factor, step = 1.0, 1.0
    for number in range(ROUNDS):
        drawn, expected = model.sample_with_mean(listed, samples=count, seed=seed, chunk_atoms=chunk_atoms)
        if not rounds and not bool((drawn.spread.forces > SMALLEST_SPREAD).any()):
            raise ValueError(
                "symmetry fixes all forces of these structures, so the spread cannot be calibrated on them; use "
                "structures with displaced atoms"
            )
        rounds.append(_Round.of(factor, drawn, expected, target))
        if progress:
            progress(number + 1, ROUNDS)
        best = min(rounds, key=lambda one: one.crps)
        if best is rounds[-1]:
            step = max(best_factor(drawn.forces.double(), target), SMALLEST / factor)
        else:  # the step was too large: a non-linear response makes the mean of a wide spread worse
            step = math.sqrt(step)
        last = number == ROUNDS - 1 or abs(step - 1) < CLOSE
        change = best.factor * (1.0 if last else step) / factor
        model.scale_spread(change)
        factor *= change
        if last:
            break
    shift = 0.0
    learner = model.learner()
    if learner.calibrated_after and (model.history is None or model.history.energy_offsets):
        shift = float((rounds[0].energy - best.energy).mean())
        for part in learner.parts():
            part.backbone.shift_all(shift)
    moving = best.spread > SMALLEST_SPREAD
    sigma = torch.from_numpy(metrics.predictive_sigma(best.spread[moving], count))
    scores = ((best.forces - target).abs()[moving] / sigma).numpy()
    system = drawn.system[:, None].expand_as(moving)[moving].numpy()
    model.calibration = Calibration(
        factor=best.factor,
        crps=(rounds[0].crps, best.crps),
        ssr=(rounds[0].ssr, best.ssr),
        level=level,
        conformal=conformal_factor(scores, system, level=level),
        structures=len(listed),
        samples=count,
        seed=seed,
        shift=shift,
        data=data,
    )
    return model.calibration
