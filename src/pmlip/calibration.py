"""After training: one factor for the spread, fitted on validation data, and intervals of guaranteed coverage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ase import Atoms
from torch import Tensor

from pmlip import metrics
from pmlip.methods.base import Method, Progress
from pmlip.provenance import Calibration
from pmlip.samples import SMALLEST_SPREAD, Outputs, Samples
from pmlip.scores import fair_crps
from pmlip.spread_fit import LEVEL, SMALLEST, best_factor, check_count, check_level, conformal_factor
from pmlip.structures.atoms import as_structures
from pmlip.structures.labels import labels, require_labels

ROUNDS = 5  # of fitting and scaling, at most
CLOSE = 0.01  # a factor this near to 1 changes nothing


@dataclass(frozen=True)
class _Round:
    """What the noise scaled by a factor gives."""

    factor: float
    crps: float
    ssr: float
    energy: Tensor  # (structure,) of the mean over all noise, eV per atom
    forces: Tensor  # of the mean over all noise
    spread: Tensor  # of the forces

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
    """Scale the spread of a model in place, by the factor with the smallest CRPS of the forces of these structures.

    The factor acts on the noise (or on the width of a Gaussian), so that samples stay potentials, with one factor for
    energies, forces and stress. Since the response to noise is not quite linear, it is fitted again after each change;
    what is kept is the best of the factors tried. A constant in the energies is moved so that their mean stays where it
    was, unless the model was trained without such offsets.
    data: a name for these structures, for the record. chunk_atoms: as in `Method.sample`.
    """
    listed = as_structures(valid)
    count = model.spread_samples(samples)
    check_count(count)
    check_level(level)
    require_labels(listed, ["forces"])
    model.scale_spread(1.0)  # refuses now what cannot be scaled
    target = labels(listed).forces
    rounds: list[_Round] = []
    factor, step = 1.0, 1.0
    for number in range(ROUNDS):
        drawn, expected = model.sample_with_mean(listed, samples=count, seed=seed, chunk_atoms=chunk_atoms)
        if not rounds and not bool((drawn.spread.forces > SMALLEST_SPREAD).any()):
            raise ValueError("symmetry fixes all forces of these structures, so they do not tell how large a spread is")
        rounds.append(_Round.of(factor, drawn, expected, target))
        if progress:
            progress(number + 1, ROUNDS)
        best = min(rounds, key=lambda one: one.crps)
        if best is rounds[-1]:
            step = max(best_factor(drawn.forces.double(), target), SMALLEST / factor)
        else:  # that was too far: where the response is curved, a wide spread has a bad mean
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
