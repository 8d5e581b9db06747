"""Closest matches for names that are not known."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(name: object, known: Iterable[str]) -> str:
    """A sentence that offers the closest known name, or lists what is known when nothing is close."""
    names = list(known)
    close = get_close_matches(str(name), names, n=1, cutoff=0.6) or [
        n for n in names if n.lower() == str(name).lower()
    ]
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "There is none."
