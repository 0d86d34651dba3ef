import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from rich.console import Console
from scipy import stats

import pmlip
from conftest import randomise_noise
from molecules import molecules
from pmlip import evaluation, metrics, score_table
from pmlip.cli.score_table import comparison_line, force_table, score_table_of
from pmlip.evaluation import as_record, compare, evaluate
from pmlip.report.entry import Entry, score_row
from pmlip.samples import SMALLEST_SPREAD
from pmlip.score_table import METRICS, Metric, TableColumn, benchmark_columns, benchmark_scores
from pmlip.structures.labels import labels
from tiny import tiny_backbone


@pytest.fixture(scope="module")
def model():
    made = randomise_noise(pmlip.perturb(tiny_backbone()))
    made.fit_novelty(molecules(30, seed=1), valid=molecules(30, seed=2))
    return made


@pytest.fixture(scope="module")
def result(model):
    return evaluate(model, molecules(), samples=6, seed=3)


def text_of(table):
    console = Console(record=True, width=200)
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize("output", ["forces", "energy"])
def test_scores_follow_their_formulas(model, result, output):
    data = molecules()
    drawn, target = model.sample(data, samples=6, seed=3), labels(data)
    per = target.atoms_per_system if output == "energy" else 1
    samples, label = ((outputs[output].double() / per).numpy() for outputs in (drawn, target))
    error, spread = samples.mean(0) - label, samples.std(0, ddof=1)
    width = np.sqrt(1 + 1 / 6) * spread
    pairs = np.abs(samples[:, None] - samples[None]).sum((0, 1)) / (2 * 6 * 5)
    scores = result.scores[output]
    expected = {
        "mae": np.abs(error).mean(),
        "rmse": np.sqrt((error**2).mean()),
        "crps": (np.abs(samples - label).mean(0) - pairs).mean(),
        "spread": np.sqrt((spread**2).mean()),
        "ssr": np.sqrt((width**2).mean() / (error**2).mean()),
        "coverage_95": (np.abs(error) <= stats.t.isf(0.025, 5) * width).mean(),
    }
    if output == "forces":
        own, size = ((x**2).sum(-1) for x in (error, samples.mean(0)))
        expected["spearman_atom"] = stats.spearmanr(own, (spread**2).sum(-1)).statistic
        expected["spearman_atom_of_force"] = stats.spearmanr(own, size).statistic
        found = model.novelty(data)
        expected["spearman_atom_of_novelty"] = stats.spearmanr(own, found.atom).statistic
        sigma, point = found.sigma[:, None].numpy(), model.predict(data).forces.numpy() - label
        expected["ssr_one_pass"] = np.sqrt((sigma**2).mean() / (point**2).mean())
        z = point / sigma
        crps = sigma * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
        expected["crps_one_pass"] = crps.mean()
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_every_metric_has_a_value_and_an_interval_around_it(result):
    for metric in METRICS:
        for output, columns in result.columns.items():
            if output in metric.outputs and columns.labelled:
                value, low, high = metric.interval(columns)
                assert value == result.scores[output][metric.name]
                assert low <= high


def test_forces_that_symmetry_fixes_do_not_count_as_covered(model):
    crystal = Atoms("Cu", cell=[2.4, 2.4, 2.4], pbc=True)
    crystal.calc = SinglePointCalculator(crystal, energy=-3.0, forces=np.zeros((1, 3)))
    data = molecules()
    alone, mixed = (evaluate(model, some, samples=4) for some in (data, [*data, crystal]))
    columns = mixed.columns["forces"]
    assert (columns.entries["spread"] < SMALLEST_SPREAD).sum() == 3
    assert mixed.scores["forces"]["coverage_95"] == pytest.approx(alone.scores["forces"]["coverage_95"])
    assert mixed.scores["forces"]["mae"] < alone.scores["forces"]["mae"]  # of all entries


def test_scaled_samples_have_their_own_crps_in_every_table(result):
    scaled = result.scaled(0.5)
    columns = scaled.columns["forces"]
    assert scaled.scores["forces"]["crps"] == pytest.approx(columns.entries["crps"].mean())
    assert scaled.scores["forces"]["spread"] == pytest.approx(result.scores["forces"]["spread"] / 2)


def test_names_are_unique():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    columns = [column.name for metric in METRICS for column in metric.benchmark.values()]
    assert len(set(columns)) == len(columns)
    assert set(benchmark_columns()) == {*columns, *(one.name for one in score_table.COMPARISONS)}


def test_a_new_metric_is_one_entry(result, monkeypatch):
    """It appears in the scores, JSON, the terminal, the report with an interval, and the files of the benchmarks."""
    largest = Metric(
        name="largest",
        title="largest error",
        rows="entries",
        columns=("error",),
        function=lambda error: float(np.abs(error).max()),
        unit="output",
        report=("forces",),
        benchmark={"forces": TableColumn("force_largest", "F-largest", 1)},
    )
    monkeypatch.setattr(score_table, "METRICS", (*METRICS, largest))
    again = replace(result)  # without what was computed before
    error = (result.drawn.mean.forces - result.target.forces).abs().max()
    value = again.scores["forces"]["largest"]
    assert value == pytest.approx(float(error))
    assert as_record(again)["energy"]["largest"] > 0
    shown = largest.shown(value, "forces")
    assert "largest error" in text_of(score_table_of("p-tiny", again))
    assert shown in text_of(score_table_of("p-tiny", again))
    assert shown in text_of(force_table("forces", {"some": again}, ("largest",)))
    own, low, _ = score_row(Entry("p-tiny", "data.extxyz", again))["cells"]["largest error, meV/Å"]
    assert own == shown
    assert low is not None
    assert benchmark_scores(again.scores)["force_largest"] == value
    assert benchmark_columns()["force_largest"] == (TableColumn("force_largest", "F-largest", 1), 1e3)


def test_the_terminal_shows_every_score_with_its_unit(result):
    text = text_of(score_table_of("p-tiny", result))
    assert "forces, meV/Å" in text
    assert f"{result.scores['forces']['ssr']:.2f}" in text
    assert f"|F| alone {result.scores['forces']['spearman_atom_of_force']:.2f}" in text
    assert "nan" not in text
    line = comparison_line("test", "hot", compare(result, result))
    assert line.startswith("hot compared with test: AUROC of the spread 0.50")


@pytest.mark.parametrize(("value", "shown"), [(0.0123456, "12.3"), (12.3456, "12346"), (9.994e-4, "0.999")])
def test_values_are_shown_in_the_unit_of_their_output(value, shown):
    assert score_table.metric("crps").shown(value, "forces") == shown


def test_coverage_is_shown_in_percent():
    assert score_table.metric("coverage_95").shown(0.947, "energy") == "95 %"


def test_the_evaluation_does_not_import_the_report():
    for module in (evaluation, score_table, metrics):
        names = [
            name.name if isinstance(node, ast.Import) else f"{node.module}.{name.name}"
            for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        ]
        assert not [name for name in names if "report" in name]


def test_a_model_without_a_spread_is_ranked_by_novelty():
    made, data = pmlip.methods.make("deterministic", tiny_backbone()), molecules(30)
    assert "spearman_atom_of_novelty" not in evaluate(made, data, samples=1).scores["forces"]
    made.fit_novelty(data[:10], valid=data[10:])
    result = evaluate(made, data[10:], samples=1)
    assert {"spearman_atom_of_novelty", "crps_one_pass"} <= result.scores["forces"].keys()
    assert "spearman_atom" not in result.scores["forces"]
    assert f"outside the training set: {result.outside} of 20 structures" in text_of(score_table_of("tiny", result))
    assert as_record(result)["outside_the_training_set"] == result.outside
    assert compare(result, result)["auroc_novelty"] == 0.5


def test_error_bars_that_are_unknown_have_no_score():
    made, data = pmlip.methods.make("deterministic", tiny_backbone()), molecules(30)
    made.fit_novelty(data[:10], valid=data[10:])
    other = data[0].copy()
    other.symbols[0] = "N"
    other.calc = data[0].calc
    other.calc.atoms = other
    scores = evaluate(made, [other, *data[1:5]], samples=1).scores["forces"]
    assert "crps_one_pass" not in scores
    assert np.isfinite(scores["spearman_atom_of_novelty"])  # the unknown element has the highest rank
