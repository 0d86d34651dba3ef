"""A report on a model and its uncertainty, in one HTML file that works offline.

It contains scores, figures, a 3-D view of the most uncertain structures, and sentences that interpret the scores.
"""

import importlib.util
import io
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmlip import metrics
from pmlip.atomic_files import atomic_write
from pmlip.evaluation import Evaluation
from pmlip.report import plots
from pmlip.report.entry import Entry, score_row
from pmlip.report.verdicts import headline, sentences
from pmlip.report.view import view, viewer_code

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_installed", "write_report"]


def write_report(
    path: str | Path,
    models: Mapping[str, Evaluation],
    *,
    data: str = "structures",
    unseen: Mapping[str, Evaluation] | None = None,
    records: Mapping[str, Any] | None = None,
) -> None:
    """Write an HTML report of one or more models on the same structures.

    models: evaluations by model name. data: name of the structures. unseen: evaluations of the first model on
    out-of-distribution structures, by the name of the structures. records: training and calibration of each model, by
    model name.
    """
    check_installed()
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    inside = [Entry(model, data, evaluation) for model, evaluation in models.items()]
    outside = [Entry(inside[0].model, name, evaluation) for name, evaluation in (unseen or {}).items()]
    for entry in (*inside, *outside):
        _check(entry)
    for entry in inside:
        if not entry.has_varying_forces:
            raise ValueError(
                f"symmetry fixes all forces of {entry.data}, so the spread is zero; use structures with displaced atoms"
            )
    template = Environment(loader=PackageLoader("pmlip", "report"), autoescape=True).get_template("report.html")
    shown = [entry for entry in outside if entry.has_varying_forces]
    rows = [score_row(entry) for entry in (*inside, *shown)]
    text = template.render(
        title=f"{inside[0].model} on {data}",
        records=records or {},
        rows=rows,
        columns=list(dict.fromkeys(name for row in rows for name in row["cells"])),
        headline=dict(zip(("verdict", "text"), headline(inside[0], outside), strict=True)),
        sentences=sentences(inside, outside, records or {}),
        figures={name: Markup(svg) for name, svg in _figures(inside, shown).items()},
        view=view(inside[0]),
        has_novelty=inside[0].evaluation.novelty is not None,
        viewer=Markup(viewer_code()),
        version=version("pmlip"),
    )
    with atomic_write(path) as file:
        file.write(text.encode())


def check_installed() -> None:
    """Raise ImportError if a package that reports need is missing; call it before long computations."""
    for package in ("chemiscope", "jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"a report needs {package}: pip install 'pmlip[report]'")


def _check(entry: Entry) -> None:
    if not entry.forces.has_spread:
        raise ValueError(f"{entry.model} has no spread to report on; its errors are in Evaluation.scores")
    if not bool(entry.forces.present.all()):
        raise ValueError(
            f"a report needs the forces of every structure; remove the structures of {entry.data} without them"
        )


def _figures(inside: Sequence[Entry], unseen: Sequence[Entry]) -> dict[str, str]:
    forces = {entry.model: entry.forces for entry in inside}
    first = inside[0].forces
    pairs = {name: (own.varying_atoms["spread"], own.varying_atoms["error"]) for name, own in forces.items()}
    made = {
        "spread": plots.spread_and_error(pairs),
        "force": plots.force_and_error(first.varying_atoms["force"], first.varying_atoms["error"]),
        "reliability": plots.reliability(
            {name: metrics.pit(own.samples[:, own.varying], own.label[own.varying]) for name, own in forces.items()}
        ),
        "ranks": plots.ranks(metrics.rank_histogram(first.samples[:, first.varying], first.label[first.varying])),
        "sparsification": plots.sparsification(pairs, first.varying_atoms["force"]),
        "parity": plots.parity(
            first.entries["label"],
            first.entries["label"] + first.entries["expected_error"],
            first.entries["spread"],
            unit="eV/Å",
            title="Forces",
        ),
    }
    if "energy" in inside[0].evaluation.scores:
        entries = inside[0].evaluation.columns["energy"].entries
        label, expected = entries["label"], entries["label"] + entries["expected_error"]
        made["energy"] = plots.parity(
            1e3 * (label - label.mean()),
            1e3 * (expected - expected.mean()),
            1e3 * entries["spread"],
            unit="meV/atom",
            title="Energies relative to their mean",
        )
    if unseen:
        places = (inside[0], *unseen)
        made["outside"] = plots.inside_and_outside(
            {entry.data: entry.evaluation.spread for entry in places},
            {entry.data: entry.evaluation.error for entry in places},
        )
        if all(entry.evaluation.novelty is not None for entry in places):
            made["novelty"] = plots.inside_and_outside(
                {
                    entry.data: entry.evaluation.novelty.structure.numpy()
                    for entry in places
                    if entry.evaluation.novelty
                },
                {entry.data: entry.evaluation.error for entry in places},
                novelty=True,
            )
    return {name: _as_svg(figure) for name, figure in made.items()}


def _as_svg(figure: "Figure") -> str:
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context(plots.STYLE):
        figure.savefig(text, format="svg", dpi=120, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
