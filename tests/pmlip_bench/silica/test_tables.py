import pytest

from pmlip import methods
from pmlip_bench.runner import Cell
from pmlip_bench.silica.tables import (
    METHODS,
    figure,
    overview,
    ranking_table,
    summary,
    table,
    together_table,
    trials_table,
    unseen_table,
)
from pmlip_bench.silica.variants import COMPARED


def result(method, seed, crps, *, backbone="chgnet", data="silica-pbe", size=32):
    scores = {"force_mae": 0.04, "force_mae_expected": 0.038, "force_crps": crps, "spearman": 0.8, "ssr": 0.9}
    scores["energy_crps"] = 0.001
    outside = {"auroc_spread": 0.75, "auroc_force": 0.7, "error_ratio": 2.0, "spread_ratio": 1.5, "ssr": 0.6}
    outside |= {"force_mae": 0.09, "force_crps": 0.07}
    cost = {"passes": 100, "seconds": 2.0}
    return Cell(f"{backbone}-{data}-{method}".replace(":", "_"), size, seed), {
        "cell": {"backbone": backbone, "data": data, "method": method, "size": size, "seed": seed},
        "samples": 32,
        "test": scores,
        "test_as_trained": scores | {"ssr": 0.7},
        "unseen": {"hot": outside},
        "test_and_unseen": {"spearman": 0.8, "spearman_of_force": 0.7},
        "training": cost,
        "prediction": cost,
        "settings": {"data": data},
    }


@pytest.fixture
def results():
    return dict([result("p", 0, 0.02), result("p", 1, 0.03), result("constant", 0, 0.035)])


def test_seeds_are_averaged(results):
    constant, of_p = summary(results)
    assert (of_p["method"], of_p["size"], of_p["seeds"]) == ("p", 32, 2)
    assert of_p["force_crps"] == pytest.approx({"mean": 0.025, "std": 0.01 / 2**0.5})
    assert constant["unseen"]["hot"]["auroc_spread"] == {"mean": 0.75, "std": 0.0}
    assert "chgnet on silica-pbe:" in table(results)
    assert "| 32 | p | 32 | 40.0 | 38.0 |  | 25.0 ± 7.1 | 0.90 | 0.70 |  | 0.80 |" in table(results)
    assert "| 32 | p | 32 | 0.80 |  | 0.80 |  |  |  |  |  | 2 |" in ranking_table(results)
    assert "| 32 | hot | p | 90.0 | 70.0 | 2.0 | 1.5 | 0.60 | 0.75 | 0.70 |  | 2 |" in unseen_table(results)
    assert "| 32 | p | 32 | 0.80 | 0.80 | 0.70 | 2 |" in together_table(results)
    assert overview(results).splitlines() == [
        "| F-CRPS, meV/Å (SSR) | chgnet on silica-pbe, n = 32 |",
        "| --- | --- |",
        "| constant | 35.0 (0.90) |",
        "| p | 25.0 ± 7.1 (0.90) |",
    ]


def test_a_score_that_one_seed_lacks_is_that_of_the_others(results):
    for seed, (_, content) in enumerate(results.items()):
        content["unseen"] = {"hot": dict(content["unseen"]["hot"])}
        if seed == 1:
            del content["unseen"]["hot"]["auroc_spread"]
    assert summary(results)[1]["unseen"]["hot"]["auroc_spread"] == {"mean": 0.75, "std": 0.0}


def test_the_trials_of_a_setting_stand_in_one_line(results):
    lines = trials_table(results).splitlines()
    assert lines[2:] == [
        "| constant | 40.0 | 35.0 | 0.70 | 1.00 | 0.75 | 1 |",
        "| p | 40.0 | 25.0 ± 7.1 | 0.70 | 1.00 | 0.75 | 2 |",
    ]


def test_the_papers_values_stand_only_beside_its_own_backbone_and_data(results):
    backbone = "orb:orb_v3_direct_20_omat"
    results |= dict([result("p", 0, 0.02, backbone=backbone)])
    assert "paper" not in table(results)
    own = result("p", 0, 0.02, backbone=backbone, data="train")
    own[1]["settings"]["data"] = "tan_silica:train.xyz"
    results |= dict([own])
    assert table(results).count("(paper ") == 3
    assert "20.0 (paper 1.9 ± 0.1)" in table(results)


def test_the_papers_values_stand_beside_the_papers_settings():
    results = {}
    for method in ("p+paper", "blip+published", "constant"):
        cell, content = result(method, 0, 0.02, backbone="orb:orb_v3_direct_20_omat", data="train")
        content["settings"]["data"] = "tan_silica:train.xyz"
        results[cell] = content
    _, blip, ours = summary(results)
    assert ours["paper_force_crps"]["mean"] == pytest.approx(1.94e-3)
    assert blip["paper_force_crps"]["mean"] == pytest.approx(5.78e-3)
    assert table(results).count("(paper ") == 6


def test_every_method_has_its_place():
    assert sorted(METHODS) == sorted([*methods.available(), *COMPARED])


def test_the_figure_has_a_row_for_each_backbone_and_data(results):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    results |= dict([result("p", 0, 0.02, data="edi")])
    assert [axes.get_title() for axes in figure(results).axes] == 2 * [
        "F-MAE, meV/Å",
        "F-CRPS, meV/Å",
        "SSR",
        "Spearman",
    ]
