import pytest

from pmlip_bench.nbody.tables import ablations, details, figure, overview, summary, table
from pmlip_bench.runner import Cell


@pytest.fixture
def results():
    """Two seeds of P-EGNN and one EGNN, which has no spread."""

    def result(samples, scores):
        return {
            "samples": samples,
            "test": scores,
            "test_as_trained": scores,
            "out_of_distribution": scores,
            "equivariance_error": {"rotation": 2e-7, "relabelling": 0.03},
            "training": {"passes": 100, "seconds": 2.0},
            "prediction": {"seconds": 3.0},
        }

    return {
        Cell("p-egnn", 1000, 0): result(100, {"mse": 0.007, "crps": 0.02, "ssr": 0.8}),
        Cell("p-egnn", 1000, 1): result(100, {"mse": 0.009, "crps": 0.03, "ssr": 0.9}),
        Cell("egnn", 3000, 0): result(1, {"mse": 0.006, "crps": 0.025}),
    }


def test_seeds_are_averaged_beside_the_paper(results):
    of_p, of_egnn = summary(results)
    assert (of_p["method"], of_p["size"], of_p["seeds"]) == ("p-egnn", 1000, 2)
    assert of_p["mse"] == pytest.approx({"mean": 0.008, "std": 0.002 / 2**0.5})
    assert of_p["paper_crps"] == pytest.approx({"mean": 0.0231, "std": 0.0016})
    assert "ssr" not in of_egnn
    assert "| 1000 | p-egnn | 100 | 8.00 ± 1.41 | 7.89 ± 0.60 | 2.50 ± 0.71 |" in table(results)


def test_the_overview_has_a_row_for_each_method_and_a_column_for_each_size(results):
    assert overview(results).splitlines() == [
        "| CRPS x 1e2 (SSR) | n = 1000 | n = 3000 |",
        "|---|---|---|",
        "| egnn |  | 2.50 |",
        "| p-egnn | 2.50 ± 0.71 (0.85) |  |",
        "| p-egnn, paper | 2.31 ± 0.16 (0.75) |  |",
    ]


def test_the_details_have_what_a_method_has(results):
    results[Cell("p-egnn", 1000, 0)] |= {"test_three_samples": {"crps": 0.024}, "test_at_zero_noise": {"mse": 0.01}}
    assert details(results).splitlines()[2:] == [
        "| 1000 | p-egnn | 2.4 | 10 | 8 | 2.5 | 0.85 | 2e-07 | 3e-02 |",
        "| 3000 | egnn |  |  | 6 | 2.5 |  | 2e-07 | 3e-02 |",
    ]


def test_an_ablation_stands_below_what_it_changes(results):
    other = Cell("p-egnn", 1000, 1)
    changed = {
        Cell("p-egnn+a-change", 1000, 1): results[other],
        Cell("egnn+slow", 3000, 0): results[Cell("egnn", 3000, 0)],
    }
    assert ablations(changed, results).splitlines()[2:] == [
        "| 1000 | p-egnn | 9.00 | 3.00 | 0.90 | 1.0e+02 | 1 |",  # of the same seed
        "| 1000 | p-egnn, a-change | 9.00 | 3.00 | 0.90 | 1.0e+02 | 1 |",
        "| 3000 | egnn | 6.00 | 2.50 |  | 1.0e+02 | 1 |",
        "| 3000 | egnn, slow | 6.00 | 2.50 |  | 1.0e+02 | 1 |",
    ]


def test_the_figure_has_a_panel_for_each_score(results):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert [axes.get_title() for axes in figure(results).axes] == ["MSE × 1e3", "CRPS × 1e2", "SSR"]
