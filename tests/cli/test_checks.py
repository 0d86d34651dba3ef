import pytest

from pmlip.cli.checks import chosen_device


@pytest.mark.parametrize("device", ["foo", "", "meta", "cuda:99", "cpu:x", "xla"])
def test_a_device_that_cannot_be_used_is_one_sentence(device):
    with pytest.raises(ValueError, match=rf"device '{device}' is not available on this machine; allowed: cpu") as found:
        chosen_device(device)
    assert "\n" not in str(found.value)


def test_the_processor_is_always_available():
    assert chosen_device("cpu") == "cpu"
    assert chosen_device(None)
