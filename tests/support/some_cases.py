"""Cases of which `make test` takes a few; all others are slow."""

from collections.abc import Hashable, Iterable
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
