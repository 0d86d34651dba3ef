"""What a misspelt name was probably meant to be."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """The end of a sentence, "; did you mean 'blip'?", or nothing where no name is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
