"""Ranks are struck that share an engine, which stays for the next attempt; and its processes as it waits."""

import signal

import psutil
import pytest
from chaos_cases import PARALLEL
from chaos_chains import chains_of, take
from chaos_runs import Result
from chaos_waiting import between_attempts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@chains_of("kept_parallel")
def test_ranks_that_are_struck_find_the_engine_that_they_share_unless_its_weights_were_half_replaced(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)


def process_of(engines, name):
    (found,) = [pid for pid in engines if psutil.Process(pid).cmdline()[0].strip() == f"VLLM::{name}"]
    return found


@pytest.mark.parametrize(
    ("name", "how"),
    [("Worker_TP1", signal.SIGKILL), ("Worker_TP1", signal.SIGSTOP), ("EngineCore", signal.SIGKILL)],
)
def test_an_engine_that_loses_a_process_while_it_waits_is_done_without(
    name, how, inputs, undisturbed, tmp_path
):
    with between_attempts(inputs, tmp_path, PARALLEL) as (chaos, engines):
        now = chaos.engines_after(process_of(engines, name), how)
        assert not now.keys() & engines.keys()
        chaos.reach_end()
    Result.read(chaos.output).check_equal(undisturbed(PARALLEL))


def test_all_processes_of_an_engine_that_waits_end_with_the_launcher(inputs, tmp_path):
    with between_attempts(inputs, tmp_path, PARALLEL):
        pass
