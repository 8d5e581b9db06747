"""Checks have one form: a function that yields errors, and a row that says when it is asked, and of what."""

import importlib
import inspect
import pkgutil

import pytest

from siirl.compiler import backends, checks
from siirl.compiler.backends import ROLLOUT_BACKENDS, TRAIN_BACKENDS
from siirl.compiler.backends.base import ASKED
from siirl.compiler.checks.table import CHECKS

GIVEN = {
    "ops": {"nodes"},
    "interactions": {"nodes", "talking"},
    "nodes": {"kept", "whole", "world"},
    "engines": {"interactions", "models", "configs"},
    "places": {"nodes", "graph", "places"},
    "plan": {"plan", "run", "configs"},
    "model": {*ASKED},
}
"""Stage -> what is known then."""
ROWS = [
    *CHECKS,
    *(row for table in (TRAIN_BACKENDS, ROLLOUT_BACKENDS) for x in table.values() for row in x.checks),
]
PARTS = {"check_trained_model", "check_megatron"}
"""What rows ask, besides others."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.run.__name__)
def test_a_row_asks_for_what_is_known_in_its_stage(row):
    assert set(row.needs) <= GIVEN[row.stage]
    parameters = [p for p in inspect.signature(row.run).parameters.values() if p.default is p.empty]
    assert len(parameters) == len(row.needs)


def test_each_check_yields_errors_and_has_a_row():
    asked = {row.run for row in ROWS}
    for package in (checks, backends):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, function in vars(importlib.import_module(info.name)).items():
                if name.startswith("check_") and function.__module__ == info.name:
                    returned = str(inspect.signature(function).return_annotation)
                    assert "Iterator" in returned and "Error" in returned, name
                    assert function in asked or name in PARTS, name
