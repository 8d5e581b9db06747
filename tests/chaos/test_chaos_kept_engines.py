"""Ranks are struck whose engines stay for the next attempt, and engines while they wait for it."""

import signal

import pytest
from chaos_cases import KEPT
from chaos_chains import chains_of, take
from chaos_runs import Result
from chaos_waiting import between_attempts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@chains_of("kept_engines")
def test_ranks_that_are_struck_find_their_engines_and_the_run_ends_as_if_nothing_had_been(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_an_engine_that_is_struck_while_it_waits_is_done_without(how, inputs, undisturbed, tmp_path):
    with between_attempts(inputs, tmp_path, KEPT) as (chaos, engines):
        victim = min(engines)
        now = chaos.engines_after(victim, how)
        assert victim not in now and max(engines) in now
        chaos.reach_end()
    Result.read(chaos.output).check_equal(undisturbed(KEPT))


def test_engines_that_wait_end_with_the_launcher(inputs, tmp_path):
    with between_attempts(inputs, tmp_path, KEPT):
        pass
