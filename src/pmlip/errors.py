"""What helps to understand an error: what a misspelt name was probably meant to be, the heart of a long message."""

import difflib
from collections.abc import Iterable


class CheckpointError(ValueError):
    """A file that cannot be used, and why."""


class RunFailedError(RuntimeError):
    """A long run failed, for the reason given; what it finished is kept."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """The end of a sentence, "; did you mean 'blip'?", or nothing where no name is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def first_reason(error: Exception) -> str:
    """The first line that says something: torch tells of every weight that does not fit, below a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
