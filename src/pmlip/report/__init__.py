"""One HTML file that shows how good a model and its uncertainty are, and needs no network.

Figures, a 3-D view of the most uncertain structures, and sentences that say what they mean.
"""

import importlib.util
import io
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pmlip import metrics
from pmlip.atomic_files import atomic_write
from pmlip.report import plots
from pmlip.report.judged import Judged, score_row
from pmlip.report.verdicts import sentences
from pmlip.report.view import view, viewer_code

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Judged", "check_installed", "write_report"]


def write_report(
    path: str | Path,
    inside: Sequence[Judged],
    unseen: Sequence[Judged] = (),
    *,
    records: Mapping[str, Any] | None = None,
) -> None:
    """The report of one or more models on the same structures, and of the first of them out of distribution.

    records: what is to be said of how each model was made, by its name.
    """
    check_installed()
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    for judged in inside:
        if judged.evaluation.samples < 2 or not judged.evaluation.drawn.trained:
            raise ValueError(f"{judged.model} has no spread to report on; pmlip evaluate prints its errors")
        if not judged.forces.moving.any():
            raise ValueError(f"symmetry fixes all forces of {judged.data}, so there is no spread to report on")
    template = Environment(loader=PackageLoader("pmlip", "report"), autoescape=True).get_template("report.html")
    shown = [judged for judged in unseen if judged.forces.moving.any()]
    text = template.render(
        title=f"{inside[0].model} on {inside[0].data}",
        inside=inside,
        records=records or {},
        rows=[score_row(judged) for judged in (*inside, *shown)],
        sentences=sentences(inside, unseen, records or {}),
        figures={name: Markup(svg) for name, svg in _figures(inside, shown).items()},
        view=view(inside[0]),
        viewer=Markup(viewer_code()),
        version=version("pmlip"),
    )
    with atomic_write(path) as file:
        file.write(text.encode())


def check_installed() -> None:
    """Refuse to begin where a report could not be written in the end."""
    for package in ("chemiscope", "jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"a report needs {package}: pip install 'pmlip[report]'")


def _figures(inside: Sequence[Judged], unseen: Sequence[Judged]) -> dict[str, str]:
    forces = {judged.model: judged.forces for judged in inside}
    first, evaluation = inside[0].forces, inside[0].evaluation
    pairs = {name: (own.atom_spread, own.atom_error) for name, own in forces.items()}
    made = {
        "spread": plots.spread_and_error(pairs),
        "force": plots.force_and_error(first.atom_force, first.atom_error),
        "reliability": plots.reliability(
            {name: metrics.pit(own.samples[:, own.moving], own.target[own.moving]) for name, own in forces.items()}
        ),
        "ranks": plots.ranks(metrics.rank_histogram(first.samples[:, first.moving], first.target[first.moving])),
        "sparsification": plots.sparsification(pairs, first.atom_force),
        "parity": plots.parity(
            first.target.ravel(), first.expected.ravel(), first.spread.ravel(), unit="eV/Å", title="Forces"
        ),
    }
    if "energy" in evaluation.scores:
        atoms = evaluation.target.atoms_per_system
        target = (evaluation.target.energy / atoms).numpy()
        drawn = (evaluation.drawn.energy.double() / atoms).numpy()
        here = np.isfinite(target)
        mean = (evaluation.expected.energy.double() / atoms).numpy()[here]
        made["energy"] = plots.parity(
            1e3 * (target[here] - target[here].mean()),
            1e3 * (mean - mean.mean()),
            1e3 * drawn.std(0, ddof=1)[here],
            unit="meV/atom",
            title="Energies, each from its mean",
        )
    if unseen:
        places = (inside[0], *unseen)
        made["outside"] = plots.inside_and_outside(
            {judged.data: judged.evaluation.spread for judged in places},
            {judged.data: judged.evaluation.error for judged in places},
        )
    return {name: _as_svg(figure) for name, figure in made.items()}


def _as_svg(figure: "Figure") -> str:
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context(plots.STYLE):
        figure.savefig(text, format="svg", dpi=120, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
