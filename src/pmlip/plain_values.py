"""Check plain values that were read from a file against type annotations."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints


def check_type(value: Any, hint: Any, name: str) -> None:
    """Raise a ValueError that names the entry, unless a value and all its entries have the annotated type.

    As for a type checker, a whole number is a float; but True is not a number.
    """
    if hint is Any:
        return
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        options = [option for option in inner if value is None or option is not types.NoneType]
        if len(options) == 1:
            check_type(value, options[0], name)
        elif not any(_fits(value, option, name) for option in options):
            raise _wrong(value, hint, name)
    elif kind is tuple:
        if not isinstance(value, tuple | list) or len(value) != len(inner):
            raise _wrong(value, hint, name)
        for number, (entry, own) in enumerate(zip(value, inner, strict=True)):
            check_type(entry, own, f"{name}[{number}]")
    elif kind is Mapping:
        if not isinstance(value, Mapping):
            raise _wrong(value, hint, name)
        for key, entry in value.items():
            check_type(key, inner[0], f"a key of {name}")
            check_type(entry, inner[1], f"{name}[{key!r}]")
    elif kind is Sequence:
        if not isinstance(value, tuple | list):
            raise _wrong(value, hint, name)
        for number, entry in enumerate(value):
            check_type(entry, inner[0], f"{name}[{number}]")
    elif is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]  # mypy does not see that it is a class
            raise _wrong(value, hint, name)
        check_fields(value, name)
    elif not isinstance(value, int | float if hint is float else hint) or (
        isinstance(value, bool) and hint is not bool
    ):
        raise _wrong(value, hint, name)


def check_fields(record: Any, name: str) -> None:
    """`check_type` for every field of a dataclass."""
    hints = get_type_hints(type(record))
    for own in fields(record):
        check_type(getattr(record, own.name), hints[own.name], f"{name}.{own.name}")


def _fits(value: Any, hint: Any, name: str) -> bool:
    try:
        check_type(value, hint, name)
    except ValueError:
        return False
    return True


def _wrong(value: Any, hint: Any, name: str) -> ValueError:
    wanted = getattr(get_origin(hint) or hint, "__name__", str(hint))
    return ValueError(f"{name} is of type {type(value).__name__}, not {wanted}")
