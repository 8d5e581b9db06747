"""Cases of which `make test` takes a few; all others are slow."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest


def some(table: Iterable[Any], *often: Hashable) -> list[Any]:
    """The cases of a table as parameters; those that are not in `often`, or whose name is not, are slow.

    A tuple has the parameters of a test that has several.
    """
    return [
        case
        if getattr(case, "name", case) in often
        else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
        for case in table
    ]


def in_parts(kinds: Sequence[str], *before: Hashable, size: int = 12) -> list[Any]:
    """Parameters of a test of many kinds: so many at a time, behind `before`; each part has a deadline."""
    parts = (list(kinds[first : first + size]) for first in range(0, len(kinds), size))
    return [pytest.param(*before, part, id="-".join((*map(str, before), part[0]))) for part in parts]
