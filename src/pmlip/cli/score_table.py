"""Scores in the terminal, from the table of metrics."""

from collections.abc import Mapping

from rich.table import Table

from pmlip import score_table
from pmlip.evaluation import Evaluation, compare

EXPLANATIONS = {
    "CRPS": "error of the whole predicted distribution; without a spread it is the MAE",
    "SSR": "spread divided by RMSE, corrected for K samples; 1 is calibrated, below 1 overconfident",
    "Spearman": "rank correlation of spread and error",
    "|F| alone": "rank correlation of force norm and error",
    "beyond |F|": "rank correlation of spread and error at equal |F|",
    "novelty": "rank correlation of novelty and error",
    "one pass": "Gaussian error bars from novelty around the prediction without noise",
    "best possible": "Spearman of a perfectly calibrated model",
    "AUROC": (
        "probability that a structure of this row has a larger spread than a structure of the first row; 0.5 is chance"
    ),
    "outside": "structures outside the training set, by novelty",
}


def legend(*titles: str) -> str:
    """Explanations of these columns, in sentences."""
    return " ".join(f"{title}: {EXPLANATIONS[title]}." for title in titles)


def score_table_of(name: str, evaluation: Evaluation) -> Table:
    """The scores of one model on one set of structures: a row per output, metrics of a single output below."""
    seconds = f"{evaluation.seconds:.0f} s"
    table = Table(title=f"{name}: {evaluation.structures} structures, K = {evaluation.samples}, {seconds}")
    shown = [metric for metric in score_table.METRICS if metric.terminal]
    columns = [metric for metric in shown if len(metric.outputs) > 1]
    for title in ("", *(metric.heading for metric in columns)):
        table.add_column(title, justify="right")
    for output, scores in evaluation.scores.items():
        cells = [metric.shown(scores[metric.name], output) if metric.name in scores else "" for metric in columns]
        table.add_row(f"{output}, {score_table.UNITS[output].name}", *cells)
    below: dict[str, list[str]] = {}  # a line for each output and kind of rows
    for output, scores in evaluation.scores.items():
        for metric in shown:
            if metric.outputs == (output,) and metric.name in scores:
                value = metric.shown(scores[metric.name], output)
                below.setdefault(f"{output}, {metric.rows}", []).append(f"{metric.title} {value}")
    lines = [f"{kind}: {'; '.join(values)}" for kind, values in below.items()]
    if evaluation.outside is not None:
        lines.append(f"outside the training set: {evaluation.outside} of {evaluation.structures} structures")
    table.caption = "\n".join(lines) or None
    return table


def comparison_line(inside: str, outside: str, comparison: Mapping[str, float]) -> str:
    """The scores of `compare`, for two named sets of structures."""
    values = [f"{one.title} {comparison[one.name]:.2f}" for one in score_table.COMPARISONS if one.name in comparison]
    return f"{outside} compared with {inside}: {', '.join(values)}"


def force_table(title: str, evaluations: Mapping[str, Evaluation], metrics: tuple[str, ...]) -> Table:
    """Force scores of one model on several sets of structures, compared with the first: a row per set."""
    table = Table(title=title)
    chosen = [score_table.metric(name) for name in metrics]
    rises = {"auroc_spread": "AUROC", "auroc_novelty": "AUROC of novelty"}
    for heading in ("", *(metric.title for metric in chosen), *rises.values(), "outside"):
        table.add_column(heading, justify="right")
    first = next(iter(evaluations.values()))
    for name, evaluation in evaluations.items():
        scores = evaluation.scores["forces"]
        cells = [metric.shown(scores[metric.name], "forces") if metric.name in scores else "" for metric in chosen]
        against = {} if evaluation is first else compare(first, evaluation)
        cells += [f"{against[rise]:.2f}" if rise in against else "" for rise in rises]
        outside = "" if evaluation.outside is None else f"{evaluation.outside} of {evaluation.structures}"
        table.add_row(name, *cells, outside)
    return table
