"""What all tests of a worker share: inputs, and what a job gives that nobody strikes."""

import functools

import pytest
from chaos_chains import Undisturbed
from chaos_runs import STEPS, Chaos, Result, make_inputs
from job_harness import Inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def undisturbed(inputs, tmp_path_factory) -> Undisturbed:
    """What a job of a kind gives that nobody strikes; on Ray and with standbys, that of any local one."""

    @functools.cache
    def of(kind: str, steps: int) -> Result:
        return Chaos(inputs, tmp_path_factory.mktemp("undisturbed"), kind=kind, steps=steps).run()

    return lambda kind, steps=STEPS: of("local" if kind in ("Ray", "standby") else kind, steps)
