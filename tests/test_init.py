import pytest

import pmlip


@pytest.mark.parametrize("name", sorted(set(pmlip.__all__) - {"torchsim"}))  # which has a test of its own
def test_public_names_are_there(name):
    assert getattr(pmlip, name) is not None


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="module 'pmlip' has no attribute 'perturbe'"):
        pmlip.perturbe  # noqa: B018
