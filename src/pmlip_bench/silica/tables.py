"""Tables and figure of the silica benchmark, as Table 2 and Figure 2 of the paper, per backbone and data set."""

import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pmlip.score_table import benchmark_columns
from pmlip_bench.publish import Results, draw_score, empty_figure, over_seeds, with_deviation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIVIAL = ["deterministic", "constant", "force-scaled", "confidence"]
# order in tables and figures; other methods follow
METHODS = [
    *TRIVIAL,
    "novelty",
    "novelty-latent",
    "ensemble",
    "mc-dropout",
    "blip",
    "blip+published",
    "p",
    "p+no-tangent",
    "p+novelty",
    "p+paper",
    "p-ensemble",
]

Forms = Mapping[str, tuple[str, float, int]]  # name -> title, scale and digits


def _forms(
    names: Iterable[str], *, titles: Mapping[str, str] | None = None, digits: Mapping[str, int] | None = None
) -> Forms:
    """Title, scale and digits of each column, from the table of metrics; `titles` and `digits` override it."""
    known, own_titles, own_digits = benchmark_columns(), titles or {}, digits or {}
    made = {}
    for name in names:
        column, scale = known[_score_and_place(name)[0]]
        made[name] = (own_titles.get(name, column.title), scale, own_digits.get(name, column.digits))
    return made


def _score_and_place(name: str) -> tuple[str, str]:
    """The score a column shows and the entry of a result that holds it: ssr_as_trained -> ssr, test_as_trained."""
    ending = next((ending for ending in ("_as_trained", "_three_samples") if name.endswith(ending)), "")
    return name.removesuffix(ending), f"test{ending}"


COLUMNS = _forms(
    [
        *("force_mae", "force_mae_expected", "force_mae_without_noise", "force_crps"),
        *("ssr", "ssr_as_trained", "directions", "spearman"),
        *("energy_mae", "energy_mae_expected", "energy_crps", "energy_ssr"),
    ],
    titles={"ssr_as_trained": "as trained"},
)
RANKING = _forms(  # a separate table
    [
        *("spearman", "spearman_at_best", "spearman_three_samples", "spearman_of_force", "spearman_given_force"),
        *("spearman_atom", "spearman_atom_of_force", "spearman_atom_given_force"),
    ],
    titles={"spearman": "structures", "spearman_three_samples": "of 3 samples"},
)
FORMS: Forms = {**COLUMNS, **RANKING}
UNSEEN = _forms(  # out-of-distribution structures; ratios are relative to the test set
    [
        *("force_mae", "force_crps", "error_ratio", "spread_ratio", "ssr", "auroc_spread", "auroc_force"),
        "energy_mae",
    ],
    digits={"energy_mae": 1},
)

# The paper's Figure 2, mean and standard deviation: F-MAE and F-CRPS in meV/Å, Spearman.
PAPER_BACKBONE, PAPER_READER = "orb:orb_v3_direct_20_omat", "tan_silica:"
PAPER_COLUMNS = ("force_mae", "force_crps", "spearman")
PAPER_METHODS = {"p+paper": "p", "p+no-tangent": "p", "blip+published": "blip"}  # variants of the paper's methods
PAPER: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {
    ("blip", 32): ((6.05, 0.04), (5.78, 0.04), (0.409, 0.003)),
    ("blip", 128): ((3.27, 0.13), (2.80, 0.20), (0.466, 0.068)),
    ("blip", 1024): ((1.61, 0.00), (1.16, 0.01), (0.751, 0.004)),
    ("p", 32): ((2.39, 0.13), (1.94, 0.15), (0.855, 0.027)),
    ("p", 128): ((1.86, 0.14), (1.48, 0.09), (0.845, 0.044)),
    ("p", 1024): ((1.38, 0.05), (0.958, 0.010), (0.836, 0.016)),
}


def summary(results: Results) -> list[dict[str, Any]]:
    """Rows with mean and standard deviation over seeds for each backbone, data set, size and method.

    Rows with the paper's backbone and data also hold the paper's values.
    """
    groups: dict[tuple[str, str, int, str], list[dict[str, Any]]] = {}
    for result in results.values():
        cell = result["cell"]
        groups.setdefault((cell["backbone"], cell["data"], cell["size"], cell["method"]), []).append(result)
    rows = []
    known = {method: number for number, method in enumerate(METHODS)}
    for key, found in sorted(groups.items(), key=lambda group: (*group[0][:3], known.get(group[0][3], len(known)))):
        backbone, data, size, method = key
        row: dict[str, Any] = {"backbone": backbone, "data": data, "size": size, "method": method, "seeds": len(found)}
        row["samples"] = found[0]["samples"]
        for name in FORMS:
            score, place = _score_and_place(name)
            places = [result.get(place, result["test"]) for result in found]  # ensembles: already three samples
            values = [place[score] for place in places if score in place]
            if values:
                row[name] = over_seeds(values)
        if backbone == PAPER_BACKBONE and found[0]["settings"]["data"].startswith(PAPER_READER):
            published = PAPER.get((PAPER_METHODS.get(method, method), size), ())
            for name, (mean, std) in zip(PAPER_COLUMNS, published, strict=False):
                row[f"paper_{name}"] = {"mean": mean / COLUMNS[name][1], "std": std / COLUMNS[name][1]}
        row["unseen"] = {
            place: _each_over_seeds([result["unseen"][place] for result in found]) for place in found[0]["unseen"]
        }
        for name in ("test_and_unseen", "test_and_unseen_three_samples"):
            if together := [result[name] for result in found if name in result]:
                row[name] = _each_over_seeds(together)
        for part in ("training", "prediction"):
            # the minimum, because other work on the machine only adds time
            row[f"{part}_seconds"] = min(result[part]["seconds"] for result in found)
            row[f"{part}_passes"] = statistics.mean(result[part]["passes"] for result in found)
        rows.append(row)
    return rows


def _each_over_seeds(found: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation of each score. A seed can lack a score: constant spreads have no rank correlation."""
    names = dict.fromkeys(name for scores in found for name in scores)
    return {name: over_seeds([scores[name] for scores in found if name in scores]) for name in names}


def _form(row: dict[str, Any], forms: Forms, name: str) -> str:
    _, scale, digits = forms[name]
    return with_deviation(row[name], scale, digits) if name in row else ""


def _value(row: dict[str, Any], name: str) -> str:
    paper = row.get(f"paper_{name}")
    return _form(row, FORMS, name) + (f" (paper {_form({name: paper}, FORMS, name)})" if paper else "")


def _by_place(results: Results) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of the summary by backbone and data set."""
    rows = summary(results)
    places = sorted({(row["backbone"], row["data"]) for row in rows})
    return {place: [row for row in rows if (row["backbone"], row["data"]) == place] for place in places}


def _markdown(heading: list[str], lines: list[list[Any]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows) + "\n"


def table(results: Results) -> str:
    """Table 2 as Markdown, one table per backbone and data set: forces in meV/Å, energies in meV/atom."""
    titles = [title for title, _, _ in COLUMNS.values()]
    heading = ["n", "method", "K", *titles, "passes and seconds of training", "of prediction", "seeds"]
    parts = []
    for (backbone, data), rows in _by_place(results).items():
        lines = [
            [
                *(row["size"], row["method"], row["samples"]),
                *(_value(row, name) for name in COLUMNS),
                *(f"{row[f'{part}_passes']:.1e}, {row[f'{part}_seconds']:.0f}" for part in ("training", "prediction")),
                row["seeds"],
            ]
            for row in rows
        ]
        parts.append(f"{backbone} on {data}:\n\n{_markdown(heading, lines)}")
    return "\n".join(parts)


def overview(results: Results) -> str:
    """CRPS of the forces and spread-skill ratio: one row per method, one column per backbone, data set and size."""
    rows = {(row["backbone"], row["data"], row["size"], row["method"]): row for row in summary(results)}
    places = sorted({key[:3] for key in rows})
    lines = []
    for method in dict.fromkeys([*METHODS, *(key[3] for key in rows)]):
        found = [rows.get((*place, method)) for place in places]
        if any(found):
            lines.append([method, *(_crps_and_ratio(row) if row else "" for row in found)])
    heading = [f"{backbone.removeprefix('orb:')} on {data}, n = {size}" for backbone, data, size in places]
    return _markdown(["F-CRPS, meV/Å (SSR)", *heading], lines)


def _crps_and_ratio(row: dict[str, Any]) -> str:
    ratio = f" ({row['ssr']['mean']:.2f})" if "ssr" in row else ""
    return _value(row, "force_crps") + ratio


def ranking_table(results: Results) -> str:
    """Markdown table of Spearman correlations with the error, for the spread and for the size of the force."""
    heading = ["n", "method", "K", *(title for title, _, _ in RANKING.values()), "seeds"]
    parts = []
    for (backbone, data), rows in _by_place(results).items():
        lines = [
            [row["size"], row["method"], row["samples"], *(_value(row, name) for name in RANKING), row["seeds"]]
            for row in rows
            if "spearman" in row
        ]
        if lines:
            parts.append(f"{backbone} on {data}:\n\n{_markdown(heading, lines)}")
    return "\n".join(parts)


def unseen_table(results: Results) -> str:
    """Markdown table of out-of-distribution scores: does the spread grow with the error?"""
    heading = ["n", "structures", "method", *(title for title, _, _ in UNSEEN.values()), "seeds"]
    parts = []
    for (backbone, data), rows in _by_place(results).items():
        lines = [
            [
                *(row["size"], place, row["method"]),
                *(_form(row["unseen"][place], UNSEEN, name) for name in UNSEEN),
                row["seeds"],
            ]
            for size in dict.fromkeys(row["size"] for row in rows)
            for place in rows[0]["unseen"]
            for row in rows
            if row["size"] == size
        ]
        if lines:
            parts.append(f"{backbone} on {data}:\n\n{_markdown(heading, lines)}")
    return "\n".join(parts)


def together_table(results: Results) -> str:
    """Markdown table of how well the spread ranks test and unseen structures together by their error."""
    heading = ["n", "method", "K", "Spearman", "of 3 samples", "of the force", "seeds"]
    parts = []
    for (backbone, data), rows in _by_place(results).items():
        lines = []
        for row in rows:
            if scores := row.get("test_and_unseen"):
                three = row.get("test_and_unseen_three_samples", scores)  # ensembles: already three samples
                ranked = (scores["spearman"], three["spearman"], scores["spearman_of_force"])
                values = [with_deviation(value, 1, 2) for value in ranked]
                lines.append([row["size"], row["method"], row["samples"], *values, row["seeds"]])
        if lines:
            parts.append(f"{backbone} on {data}:\n\n{_markdown(heading, lines)}")
    return "\n".join(parts)


def trials_table(results: Results) -> str:
    """Markdown table of the tuning trials, with the AUROC of the spread for detecting unseen structures."""
    names = ("force_mae", "force_crps", "ssr_as_trained", "energy_crps")
    lines = []
    for row in summary(results):
        apart = [
            with_deviation(scores["auroc_spread"], 1, 2)
            for scores in row["unseen"].values()
            if "auroc_spread" in scores
        ]
        lines.append([row["method"], *(_value(row, name) for name in names), ", ".join(apart), row["seeds"]])
    heading = ["setting", *(COLUMNS[name][0] for name in names), "AUROC of the unseen", "seeds"]
    heading[3] = "SSR as trained"
    return _markdown(heading, sorted(lines, key=lambda line: str(line[0])))


def cover_table(results: Results) -> str:
    """Markdown table of the trials of what tangent samples cover, on the test set and on the unseen structures."""
    heading = [
        "data, n",
        "unseen",
        "covered",
        "F-CRPS",
        "SSR",
        "F-CRPS of the unseen",
        "SSR",
        "AUROC",
        "together",
        "seeds",
    ]
    lines = []
    for row in summary(results):
        for place, unseen in row["unseen"].items():
            scores = [_form(row, COLUMNS, name) for name in ("force_crps", "ssr")]
            scores += [_form(unseen, UNSEEN, name) for name in ("force_crps", "ssr", "auroc_spread")]
            scores.append(with_deviation(row["test_and_unseen"]["spearman"]))
            covered = row["method"].removeprefix("p+").removeprefix("tangent-").replace("no-tangent", "no tangent")
            lines.append([f"{row['data']}, {row['size']}", place, covered, *scores, row["seeds"]])
    return _markdown(heading, lines)


def figure(results: Results) -> "Figure":
    """Figure 2: error, CRPS, SSR and rank correlation against training size; one row per backbone and data set."""
    places = _by_place(results)
    shown = ("force_mae", "force_crps", "ssr", "spearman")
    picture = empty_figure(3.4 * len(shown), 3.2 * len(places))
    for line, (place, rows) in enumerate(places.items()):
        methods = list(dict.fromkeys([*METHODS, *(row["method"] for row in rows)]))
        for column, name in enumerate(shown):
            title, scale, _ = COLUMNS[name]
            axes = picture.add_subplot(len(places), len(shown), len(shown) * line + column + 1)
            draw_score(axes, rows, methods, name, scale=scale)
            axes.set(xlabel="training structures", title=title + (", meV/Å" if scale > 1 else ""))
            if column == 0:
                axes.set_ylabel(" on ".join(place))
            if column == 1:
                axes.legend(fontsize=7)
    return picture
