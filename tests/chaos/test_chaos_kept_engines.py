"""Ranks are struck whose engines stay for the next attempt, and engines while they wait for it."""

import os
import signal
import time

import pytest
from chaos_cases import KEPT
from chaos_chains import chains_of, take
from chaos_runs import Result
from chaos_waiting import Waiting, folders_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@chains_of("kept_engines")
def test_ranks_that_are_struck_find_their_engines_and_the_run_ends_as_if_nothing_had_been(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_an_engine_that_is_struck_while_it_waits_is_done_without(how, inputs, undisturbed, tmp_path):
    chaos = Waiting(inputs, tmp_path, kind=KEPT)
    job, engines = chaos.reach_start()
    folders = folders_of(engines)
    try:
        assert chaos.engines() == engines and len(engines) == 2
        victim = min(engines)
        os.kill(victim, how)
        time.sleep(0.5)
        chaos.go_on(job)
        chaos._wait_until(lambda: chaos.steps_done() >= 2, job, "the next steps")
        now = chaos.engines()
        folders |= folders_of(now)
        assert len(now) == 2 and victim not in now and max(engines) in now
        assert job.wait(240) == 0, chaos.console
    finally:
        chaos.end(job, folders)
    Result.read(chaos.output).check_equal(undisturbed(KEPT))


def test_engines_that_wait_end_with_the_launcher(inputs, tmp_path):
    chaos = Waiting(inputs, tmp_path, kind=KEPT)
    job, engines = chaos.reach_start()
    folders = folders_of(engines)
    try:
        assert chaos.engines() == engines and len(engines) == 2
    finally:
        chaos.end(job, folders)
