"""Fit tangent samples after training, and balance them with the learned spread on validation data."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ase import Atoms
from torch import Tensor

from pmlip.methods.base import Method
from pmlip.noise.draws import SEED_OF_FIT
from pmlip.scores import fair_crps
from pmlip.structures.atoms import Progress
from pmlip.structures.labels import labels
from pmlip.tangent import Tangent, passes_of_fit, tangents_of

TOLERANCE = 0.01  # the CRPS may be higher than the lowest CRPS by this fraction
LEARNED = np.linspace(0.2, 1.4, 13)  # factors on the learned spread
# root mean square of the tangent spread, in units of the force error
TANGENT = np.concatenate([[0.0], np.geomspace(0.05, 2.0, 17)])


def add_tangents(
    model: Method, train: Sequence[Atoms], *, cover: str | None = None, progress: Progress | None = None
) -> None:
    """Fit the tangent samples of a model to training structures. Does nothing if the method has none.

    Warns if they cannot be fitted, because the training before must not be lost. Their cost is added to the history of
    the model. cover: see `pmlip.tangent.fit`. progress(done, total) counts structures.
    """
    began = time.monotonic()
    try:
        if not model.learner().fit_tangents(train, cover=cover, progress=progress):
            return
    except ValueError as error:
        warnings.warn(f"the model has no tangent samples: {error}", stacklevel=2)
        return
    if model.history is not None:
        seconds = round(model.history.seconds + time.monotonic() - began, 1)
        passes = model.history.passes + len(tangents_of(model)) * passes_of_fit(len(train))
        model.history = replace(model.history, seconds=seconds, passes=passes)


def scale_parts(
    model: Method, valid: Sequence[Atoms], *, samples: int = 16, chunk_atoms: int | None = None
) -> float | None:
    """Scale both parts: the largest tangent part whose force CRPS on these structures is within 1 % of the lowest.

    Returns the factor on the learned part; None if the model has no tangent samples, or the structures no forces.

    Structures like the training set hardly constrain the tangent part, because it is small on them. It matters out of
    distribution, where there are no labels, so it should be as large as the data allow.
    """
    tangents = tangents_of(model)
    target = labels(valid).forces
    known = target.isfinite()
    if not tangents or not known.any():
        return None
    widths = [float(tangent.width) or 1.0 for tangent in tangents]
    _set_widths(tangents, widths)
    drawn = model.sample(valid, samples=samples, seed=SEED_OF_FIT, chunk_atoms=chunk_atoms).forces[:, known]
    _set_widths(tangents, [0.0] * len(tangents))
    learned, mean = model.sample_with_mean(valid, samples=samples, seed=SEED_OF_FIT, chunk_atoms=chunk_atoms)
    expected = mean.forces[known].double()
    own = learned.forces[:, known].double() - expected
    tangent_part = drawn.double() - learned.forces[:, known].double()
    factor, scale = best_scales(own, tangent_part, target[known] - expected)
    model.scale_spread(factor)
    _set_widths(tangents, [width * scale for width in widths])
    return factor


def _set_widths(tangents: Sequence[Tangent], widths: Sequence[float]) -> None:
    for tangent, width in zip(tangents, widths, strict=True):
        tangent.width.fill_(width)


def best_scales(learned: Tensor, tangent: Tensor, error: Tensor) -> tuple[float, float]:
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
