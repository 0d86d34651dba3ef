from dataclasses import fields

import pytest

from pmlip.benchmark import nbody_trials
from pmlip.benchmark.nbody import _make
from pmlip.benchmark.nbody_trials import ABLATIONS, OF_METHOD, START, ablations, table, trials
from pmlip.benchmark.runner import Cell
from pmlip.nbody.training import Recipe


def test_every_method_has_the_same_number_of_trials():
    assert len({len(trials([method])) for method in OF_METHOD}) == 1


def test_a_trial_changes_something_and_can_be_made():
    for name, recipe in (trials(tuple(OF_METHOD)) | ablations()).items():
        changed = [field.name for field in fields(Recipe) if getattr(recipe, field.name) != getattr(START, field.name)]
        assert changed or name.endswith(("+start", "+as-tuned", "+samples-4"))
        _make(name, recipe)
    assert len(ablations()) == len(ABLATIONS)


def test_the_table_has_the_best_first():
    def result(crps):
        return {"validation_curve": [{"mse": 0.01, "crps": crps, "loss": 0.02}], "training": {"seconds": 5.0}}

    text = table({Cell("p-egnn+worse", 1000, 0): result(0.03), Cell("p-egnn+better", 1000, 0): result(0.02)})
    assert text.splitlines()[2] == "| p-egnn | better | 0 | 10.00 | 2.00 |  |  | 0.0200 | 5 |"


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="unknown method 'p-eggn'; tuned are: egnn, blip, mc-dropout, p-egnn"):
        nbody_trials.trials(["p-eggn"])
