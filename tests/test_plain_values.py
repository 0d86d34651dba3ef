from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pmlip.plain_values import check_fields, check_type


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, int),
        (1, float),
        (True, bool),
        (None, float | None),
        (0.5, float | None),
        ([1.0, 2], tuple[float, float]),
        ({1: "a"}, Mapping[int, str]),
        (({"a": 1.0}, {}), Sequence[Mapping[str, float]]),
        (object(), Any),
    ],
)
def test_values_of_the_right_type_pass(value, hint):
    check_type(value, hint, "entry")


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ("1", float, "entry is of type str, not float"),
        (1.0, int, "entry is of type float, not int"),
        (True, float, "entry is of type bool, not float"),
        ("a", float | None, "entry is of type str, not float"),
        ([1.0], tuple[float, float], "entry is of type list, not tuple"),
        ("ab", Sequence[str], "entry is of type str, not Sequence"),
        ({"a": 1}, Mapping[int, int], "a key of entry is of type str, not int"),
        ([{"a": "b"}], Sequence[Mapping[str, float]], r"entry\[0\]\['a'\] is of type str, not float"),
        (3, Mapping[str, Any], "entry is of type int, not Mapping"),
    ],
)
def test_other_values_are_named(value, hint, message):
    with pytest.raises(ValueError, match=message):
        check_type(value, hint, "entry")


def test_fields_of_fields_are_checked():
    @dataclass
    class Inner:
        size: int

    assert check_fields(Inner(3), "one") is None
    with pytest.raises(ValueError, match=r"one\.size is of type str, not int"):
        check_fields(Inner("3"), "one")
