"""What tests import when they use it: each worker of the suite collects all files, and runs a few of them."""

import importlib
import importlib.util
from typing import Any

import pytest


class Later:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # pytest asks it of all names of a file
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def needed(package: str, reason: str = "") -> Later:
    """A package without which the tests of a file are skipped."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason or f"{package} is not installed", allow_module_level=True)
    return Later(package)
