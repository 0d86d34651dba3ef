"""Error classes, and helper functions for error messages."""

import difflib
from collections.abc import Iterable


class CheckpointError(ValueError):
    """A model file cannot be used; the message says why."""


class OutputInUseError(ValueError):
    """Another process writes this output; the message says which."""


class RunFailedError(RuntimeError):
    """A long run failed; finished parts are kept."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return "; did you mean 'blip'?" for the closest allowed name, or "" if none is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def first_reason(error: Exception) -> str:
    """Return the first informative line of an error; torch lists all mismatched weights below a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
