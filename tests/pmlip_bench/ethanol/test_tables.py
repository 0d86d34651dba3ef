import pytest

from pmlip_bench.ethanol.tables import figure, path_table, summary, table
from pmlip_bench.runner import Cell


def result(method, seed, *, error=0.2, spread=None):
    """A cell with the test set and a path of four structures, one of them in the range of the training set."""
    md = {"structures": 10, "outside_the_training_set": 1, "forces": {"mae": 0.05, "crps": 0.04, "ssr_one_pass": 0.9}}
    md |= {"novelty": {"0.5": 0.6}, "relative_energy": {"mae": 0.012, "mae_inside": 0.011}}
    pulled = {"structures": 4, "outside_the_training_set": 3, "novelty": {"0.5": 4.0}, "auroc_novelty": 0.99}
    pulled |= {"relative_energy": {"mae": 0.4}}
    dimers = {"structures": 5, "outside_the_training_set": 5, "novelty": {"0.5": None}, "auroc_novelty": 1.0}
    frames = [
        {"oh_distance": r, "force_error": sign * error, "one_pass_error_bar": 0.1, "novelty": r}
        | {"hydrogen_novelty": 2 * r, "energy_error": r - 1}
        | ({} if spread is None else {"force_spread": spread, "energy_spread": 0.1})
        for r, sign in ((0.7, 1), (1.0, -1), (1.2, 1), (1.3, -1))
    ]
    return Cell(method, 200, seed), {
        "sets": {"MD": md, "H removal": pulled, "dimers": dimers},
        "path": {"trained": [0.9, 1.1], "scores": {"mae": error, "crps": error}, "frames": frames},
    }


@pytest.fixture
def results():
    return dict([result("deterministic", 0), result("p", 0, spread=0.1), result("p", 1, error=0.4, spread=0.1)])


def test_seeds_are_averaged_and_sets_stand_together(results):
    rows = summary(results)
    assert [(row["structures"], row["method"]) for row in rows[:3]] == [
        ("MD", "deterministic"),
        ("MD", "p"),
        ("H removal", "deterministic"),
    ]
    lines = table(results).splitlines()
    assert lines[2] == "| MD | 10 | deterministic | 50 | 40 |  | 0.90 | 0.012 | 0.011 |  |  | 0.6 | 10 |  |  | 1 |"
    assert lines[5] == "| H removal | 4 | p | 300 ± 141 | 300 ± 141 |  |  | 0.400 |  |  |  | 4.0 | 75 | 0.99 |  | 2 |"
    assert lines[6] == "| dimers | 5 | deterministic |  |  |  |  |  |  |  |  |  | 100 | 1.00 |  | 1 |"


def test_the_range_of_the_training_set_stands_alone(results):
    lines = path_table(results).splitlines()
    assert lines[2] == "| 0.70 to 0.90 Å | 1 | deterministic | 0.20 |  | 0.10 | 0.70 | 1.40 | 0.30 |  |"
    assert lines[5] == "| 0.90 to 1.10 Å | 1 | p | 0.30 ± 0.14 | 0.10 | 0.10 | 1.00 | 2.00 | 0.00 | 0.10 |"
    assert lines[6] == "| 1.10 to 1.30 Å | 2 | deterministic | 0.20 |  | 0.10 | 1.25 | 2.50 | 0.25 |  |"
    assert len(lines) == 2 + 3 * 2


def test_the_picture_has_a_column_per_method_and_shades_the_range_of_the_training_set(results):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    picture = figure(results)
    assert [axes.get_title() for axes in picture.axes] == ["deterministic", "p", "", "", "", ""]
    force = picture.axes[1]
    assert [line.get_label() for line in force.lines] == ["error", "spread of the samples", "one-pass error bar"]
    assert force.lines[0].get_ydata() == pytest.approx((0.1**0.5,) * 4)
    assert force.patches[0].get_extents().width > 0
