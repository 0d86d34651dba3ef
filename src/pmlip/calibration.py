"""Calibration on validation data: factors on the spread, and conformal intervals with guaranteed coverage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
FEWEST_ENERGIES = 8  # structures with energies; a factor fitted to fewer is unreliable


@dataclass(frozen=True)
class _Round:
    """Results with the noise scaled by a factor."""

    factor: float
    crps: float
    ssr: float
    energies: Tensor  # (sample, structure) eV per atom
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
            drawn.energy.double() / drawn.atoms_per_system,
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
    energies: bool = True,
    data: str | None = None,
    chunk_atoms: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Scale the spread of a model in place by the factor with the smallest force CRPS on these structures.

    The factor acts on the noise (or on the width of a Gaussian), so each sample remains a potential, and energies,
    forces and stress share one factor. The response to noise is not exactly linear, so the factor is fitted again after
    each change, and the best factor is kept. A constant is added to the energies to keep their mean unchanged, unless
    the model was trained with offsets=False.

    A second factor, with the smallest CRPS of the energies per atom, then scales the energy spread that calculator,
    predictions and evaluation report. It does not change the samples. It needs at least 8 structures with energies.

    energies: whether to fit the factor of the energies. data: name of the structures, stored in the calibration.
    chunk_atoms: as in `Method.sample`.
    """
    listed = as_structures(valid)
    count = model.spread_samples(samples)
    check_count(count)
    check_level(level)
    require_labels(listed, ["forces"])
    model.scale_spread(1.0)  # raises now if the spread cannot be scaled
    target = labels(listed)

    def measured(factor: float) -> tuple[_Round, Tensor]:
        drawn, expected = model.sample_with_mean(listed, samples=count, seed=seed, chunk_atoms=chunk_atoms)
        if not bool((drawn.spread.forces > SMALLEST_SPREAD).any()):
            raise ValueError(
                "symmetry fixes all forces of these structures, so the spread cannot be calibrated on them; use "
                "structures with displaced atoms"
            )
        return _Round.of(factor, drawn, expected, target.forces), drawn.forces.double()

    before = measured(1.0)
    learned = scale_parts(model, listed, samples=count, chunk_atoms=chunk_atoms)
    factor, step = learned or 1.0, 1.0
    # a factor on both parts would undo the choice of a large tangent part
    most = ROUNDS if learned is None else 1
    rounds: list[_Round] = []
    for number in range(most):
        now, forces = before if number == 0 and learned is None else measured(factor)
        rounds.append(now)
        if progress:
            progress(number + 1, most)
        best = min(rounds, key=lambda one: one.crps)
        # if the last step was too large: a non-linear response makes the mean of a wide spread worse
        better = best is rounds[-1]
        step = max(best_factor(forces, target.forces), SMALLEST / factor) if better else math.sqrt(step)
        last = number == most - 1 or abs(step - 1) < CLOSE
        change = best.factor * (1.0 if last else step) / factor
        model.scale_spread(change)
        factor *= change
        if last:
            break
    shift = 0.0
    learner = model.learner()
    if learner.calibrated_after and (model.history is None or model.history.energy_offsets):
        shift = float((before[0].energy - best.energy).mean())
        for part in learner.parts():
            part.backbone.shift_all(shift)
    conformal, withheld = _conformal(best, target, count, level)
    energy_factor, energy_ssr = 1.0, None
    if energies:
        energy_factor, energy_ssr = _energy_factor(best, target.energy / target.atoms_per_system - shift)
    model.calibration = Calibration(
        factor=best.factor,
        crps=(before[0].crps, best.crps),
        ssr=(before[0].ssr, best.ssr),
        level=level,
        conformal=conformal,
        structures=len(listed),
        samples=count,
        seed=seed,
        shift=shift,
        data=data,
        withheld=withheld,
        energy_factor=energy_factor,
        energy_ssr=energy_ssr,
    )
    return model.calibration


def _conformal(best: _Round, target: Outputs, samples: int, level: float) -> tuple[float | None, str | None]:
    """The factor of the conformal intervals; or None, and why there are no intervals."""
    moving = best.spread > SMALLEST_SPREAD
    sigma = metrics.predictive_sigma(best.spread[moving], samples)
    scores = (best.forces - target.forces).abs()[moving].numpy() / sigma
    system = target.system[:, None].expand_as(moving)[moving].numpy()
    factor = conformal_factor(scores, system, level=level)
    if factor is None:
        return None, f"intervals with guaranteed {level:.0%} coverage need more than {target.systems} structures"
    width, size = factor * float(np.median(sigma)), float(target.forces.square().mean().sqrt())
    if width > size:
        return None, (
            f"intervals with guaranteed {level:.0%} coverage would be wider than the forces: their median half-width "
            f"is {width:.2g} eV/Å, and the root mean square of the validation forces is {size:.2g} eV/Å"
        )
    return factor, None


def _energy_factor(best: _Round, target: Tensor) -> tuple[float, tuple[float, float] | None]:
    """The factor on the spread of the energies with the smallest CRPS, and the SSR before and after.

    1 and None if there are too few energies. The fit is about the mean over all noise, which is the reported energy.
    The sample mean differs from it by spread / sqrt(K), and this spread can be much larger than the reported one.
    """
    known = target.isfinite()
    samples, mean, label = best.energies[:, known], best.energy[known], target[known]
    spread = samples.std(0)
    if len(label) < FEWEST_ENERGIES or not bool((spread > 0).any()):
        return 1.0, None
    factor = best_factor(samples, label, mean=mean)
    ratio = float((spread.square().mean() / (mean - label).square().mean()).sqrt())
    return factor, (ratio, factor * ratio)
