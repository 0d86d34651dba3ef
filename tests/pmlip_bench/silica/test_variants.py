from dataclasses import replace

import pytest

from pmlip import methods
from pmlip.training.config import FinetuneConfig
from pmlip_bench.silica.variants import TRIALS, VARIANTS, trials
from tiny import tiny_backbone


def test_every_method_has_the_same_number_of_trials():
    assert len({len(trials([method])) for method in TRIALS}) == 1


def test_a_variant_changes_something_and_can_be_made():
    for name, variant in VARIANTS.items():
        assert variant.config or variant.options or variant.make or name.endswith("+as-is")
        replace(FinetuneConfig(), **variant.config)
        assert methods.make(name.partition("+")[0], tiny_backbone(), **variant.options)


def test_methods_without_trials_are_refused():
    with pytest.raises(ValueError, match="unknown method 'constant'; allowed: p, blip, mc-dropout, deterministic"):
        trials(["constant"])


def test_a_single_trial_can_be_asked_for():
    assert trials(["deterministic", "p+start-3"]) == [*trials(["deterministic"]), "p+start-3"]
