import pytest
from torch import nn

from pmlip.errors import did_you_mean, first_reason


def test_a_close_name_is_offered_and_a_distant_one_is_not():
    assert did_you_mean("blib", ["p", "blip"]) == "; did you mean 'blip'?"
    assert did_you_mean("something", ["p", "blip"]) == ""


def test_of_many_weights_that_do_not_fit_the_first_is_told():
    with pytest.raises(RuntimeError) as found:
        nn.Linear(2, 3).load_state_dict(nn.Linear(3, 4).state_dict())
    assert first_reason(found.value).startswith("size mismatch for weight: ")
    assert "\n" not in first_reason(found.value)
    assert first_reason(ValueError("one line\nPlease file an issue")) == "one line"
    assert first_reason(KeyError()) == "KeyError"
