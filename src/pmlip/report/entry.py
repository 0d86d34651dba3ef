"""One model evaluated on one set of structures, and its row in the table of scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pmlip import score_table
from pmlip.evaluation import Evaluation
from pmlip.score_columns import Columns


@dataclass(frozen=True)
class Entry:
    """One model evaluated on one set of structures."""

    model: str
    data: str
    evaluation: Evaluation

    @property
    def forces(self) -> Columns:
        return self.evaluation.columns["forces"]

    @property
    def has_varying_forces(self) -> bool:
        """False if symmetry fixes all forces."""
        return len(self.forces.varying_entries) > 0


def score_row(entry: Entry) -> dict[str, Any]:
    """The scores that the report shows, with 95 % intervals from resampling whole structures.

    `cells`: title -> value, lower and upper limit, as text; an undefined limit is None.
    """
    cells: dict[str, tuple[str, str | None, str | None]] = {}
    scores = entry.evaluation.scores
    for output in ("forces", *(output for output in scores if output != "forces")):
        for metric in score_table.METRICS:
            if output not in metric.report or metric.name not in scores[output]:
                continue
            interval = metric.interval(entry.evaluation.columns[output])
            low, high = (metric.shown(end, output) if np.isfinite(end) else None for end in interval[1:])
            title = metric.heading if output == "forces" else f"{output}: {metric.heading}"
            unit = f", {metric.unit_for(output).name}" if metric.unit == "output" else ""
            cells[title + unit] = (metric.shown(scores[output][metric.name], output), low, high)
    return {"model": entry.model, "data": entry.data, "size": _size(entry), "cells": cells}


def _size(entry: Entry) -> str:
    given, shown = entry.evaluation.structures, len(np.unique(entry.forces.varying_atoms.system))
    atoms = len(entry.forces.atoms)
    text = f"{given} structures, {atoms} atoms, K = {entry.evaluation.samples}"
    if shown == given:
        return text
    return f"{text}; the figures show {shown} of {given} structures, because symmetry fixes all forces of the others"
