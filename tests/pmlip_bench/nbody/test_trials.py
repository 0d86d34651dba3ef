from dataclasses import fields
from pathlib import Path

from pmlip.nbody import data as nbody_data
from pmlip_bench.nbody.cells import RECIPES, NBodySettings, Preset, _make, prepare
from pmlip_bench.nbody.training import Recipe
from pmlip_bench.nbody.trials import ABLATIONS, ADAMW, OF_METHOD, START, ablations, table, trials
from pmlip_bench.runner import Cell, read_cells


def test_every_method_has_the_same_number_of_trials():
    assert len({len(trials([method])) for method in OF_METHOD}) == 1


def test_a_trial_changes_something_and_can_be_made():
    for name, recipe in (trials(tuple(OF_METHOD)) | ablations()).items():
        changed = [field.name for field in fields(Recipe) if getattr(recipe, field.name) != getattr(START, field.name)]
        assert changed or name.endswith("+start")
        _make(name, recipe)
    assert len(ablations()) == len(ABLATIONS)


def test_the_cells_that_are_published_belong_to_these_recipes(monkeypatch):
    """Otherwise a clone could not go on with them."""
    monkeypatch.setattr(nbody_data, "load", lambda *_: None)
    published = Path(__file__).parents[3] / "benchmarks" / "results" / "nbody"
    of_ablation = ablations() | {name: recipe for name, (recipe, _) in ADAMW.items()}
    folders = {"": RECIPES, "trials": trials(tuple(OF_METHOD)), "ablation": of_ablation}
    for folder, recipes in folders.items():
        assert read_cells(published / folder)
        prepare([], Preset(NBodySettings(), recipes), published / folder, seeds=4)


def test_the_table_has_the_best_on_the_way_first():
    def result(*crps):
        curve = [{"epoch": 10 * i, "mse": 0.01, "crps": x, "ssr": 0.5, "loss": 0.02} for i, x in enumerate(crps, 1)]
        return {"validation_curve": curve}

    rows = {Cell("p-egnn+worse", 1000, 0): result(0.03, 0.025), Cell("p-egnn+better", 1000, 0): result(0.02, 0.03)}
    rows[Cell("p-egnn+wild", 1000, 0)] = {"validation_curve": [], "diverged": "the loss was NaN"}
    assert table(rows).splitlines()[2:] == [
        "| p-egnn | better | 0 | 10, 2.00, 0.50 | 20, 10.00 | 3.00 | 0.50 | 0.0200 |",
        "| p-egnn | worse | 0 | 20, 2.50, 0.50 | 20, 10.00 | 2.50 | 0.50 | 0.0200 |",
        "| p-egnn | wild | 0 | diverged | | | | |",
    ]
