"""Balance the learned spread and the tangent spread of a model on validation data."""

from collections.abc import Sequence

import numpy as np
from ase import Atoms
from torch import Tensor

from pmlip.methods.base import Method
from pmlip.noise.draws import SEED_OF_FIT
from pmlip.scores import fair_crps
from pmlip.structures.labels import labels
from pmlip.tangent import tangents_of

TOLERANCE = 0.01  # the CRPS may be higher than the lowest CRPS by this fraction
LEARNED = np.linspace(0.2, 1.4, 13)  # factors on the learned spread
# root mean square of the tangent spread, in units of the force error
TANGENT = np.concatenate([[0.0], np.geomspace(0.05, 2.0, 17)])


def balance(model: Method, valid: Sequence[Atoms], *, samples: int = 16, chunk_atoms: int | None = None) -> None:
    """Scale both parts: the largest tangent part whose force CRPS on these structures is within 1 % of the lowest.

    Structures like the training set hardly constrain the tangent part, because it is small on them. It matters out of
    distribution, where there are no labels, so it should be as large as the data allow.
    """
    tangents = tangents_of(model)
    target = labels(valid).forces
    known = target.isfinite()
    if not tangents or not known.any():
        return
    widths = [float(tangent.width) for tangent in tangents]
    drawn = model.sample(valid, samples=samples, seed=SEED_OF_FIT, chunk_atoms=chunk_atoms).forces[:, known]
    for tangent in tangents:
        tangent.width.zero_()
    learned, mean = model.sample_with_mean(valid, samples=samples, seed=SEED_OF_FIT, chunk_atoms=chunk_atoms)
    for tangent, width in zip(tangents, widths, strict=True):
        tangent.width.fill_(width)
    expected = mean.forces[known].double()
    own = learned.forces[:, known].double() - expected
    tangent_part = drawn.double() - learned.forces[:, known].double()
    factor, scale = _best(own, tangent_part, target[known] - expected)
    model.scale_spread(factor)
    for tangent, width in zip(tangents, widths, strict=True):
        tangent.width.fill_(width * scale)


def _best(learned: Tensor, tangent: Tensor, error: Tensor) -> tuple[float, float]:
    """Factors on the learned and on the tangent deviations (sample, entry) of the samples from their mean."""
    unit = float(error.square().mean().sqrt() / tangent.square().mean().sqrt().clamp(min=1e-12))
    table = [
        (float(fair_crps(factor * learned + scale * unit * tangent, error).mean()), scale * unit, factor)
        for scale in TANGENT.tolist()
        for factor in LEARNED.tolist()
    ]
    lowest = min(crps for crps, _, _ in table)
    allowed = [row for row in table if row[0] <= (1 + TOLERANCE) * lowest]
    largest = max(scale for _, scale, _ in allowed)
    _, scale, factor = min(row for row in allowed if row[1] == largest)
    return factor, scale
