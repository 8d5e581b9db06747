"""A run whose workers are killed goes on by itself, and ends as one that nobody disturbed, bit for bit."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from job_harness import Finished, Inputs, overrides, run_job
from killed_jobs import ranks_of, run_and_kill, start, steps_done, wait_until

from siirl.runs.run_state import read_run

pytestmark = pytest.mark.timeout(300)
KEYS = ("trainer.total_training_steps=8", "trainer.logger=[console]")
FRESH = ("trainer.resume_mode=disable", "trainer.overwrite=true")
IN_THE_BACKGROUND = "actor_rollout_ref.actor.checkpoint.async_save=true"
MEASURED = re.compile(r"time|perf/|memory/|.*_s$")
"""Metrics that differ between two runs of the same command."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def command(inputs: Inputs, output: Path, *keys: str) -> list[str]:
    ranks = "trainer.n_gpus_per_node=2"
    return [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, output, *KEYS, ranks, *keys)]


def results(output: Path) -> tuple[list[dict], dict]:
    """Metrics that must be equal, a dict a line, and the exported weights."""
    done = Finished.read(output)
    lines = [{k: v for k, v in line.items() if not MEASURED.match(k)} for line in done.lines]
    return lines, done.weights()


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed")
    run_job(2, overrides(inputs, output, *KEYS), deadline_s=120)
    return results(output)


def check_same(output: Path, undisturbed: tuple[list[dict], dict]) -> None:
    lines, weights = results(output)
    assert [line["step"] for line in lines] == list(range(9)), "each step once"
    assert lines == undisturbed[0]
    assert weights.keys() == undisturbed[1].keys() and len(weights) > 5
    assert all(weights[name].equal(tensor) for name, tensor in undisturbed[1].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "keys", "at_steps", "victims"),
    [
        ("SIGKILL", ("trainer.save_freq=2",), [3, 5, 7], [0, 1]),
        ("SIGSEGV", ("trainer.save_freq=100",), [1, 3], [0]),
        ("SIGTERM", ("trainer.save_freq=3", *FRESH, "trainer.max_restarts=1"), [1, 4], [1]),
        ("SIGKILL", ("trainer.save_freq=1", IN_THE_BACKGROUND), [2, 4, 6], [0]),
        ("SIGSTOP", ("trainer.save_freq=2",), [3, 6], [1]),
        ("SIGKILL", ("trainer.memory_checkpoint_freq=2",), [1, 4, 6], [0, 1]),
        (
            "SIGKILL",
            ("trainer.save_freq=2", "trainer.memory_checkpoint_freq=1", IN_THE_BACKGROUND),
            [2, 3, 4, 5, 6],
            [1],
        ),
    ],
    ids=[
        *("both ranks", "before a checkpoint", "resume_mode=disable", "saves in the background", "stopped"),
        *("in memory", "in memory and on disk"),
    ],
)
def test_any_kills_leave_the_result_as_it_was(number, keys, at_steps, victims, inputs, undisturbed, tmp_path):
    words = command(inputs, tmp_path / "out", *keys)
    code, console = run_and_kill(words, tmp_path, at_steps, victims, signal.Signals[number])
    assert code == 0, console
    check_same(tmp_path / "out", undisturbed)
    state = read_run(tmp_path / "out")
    assert len(state.attempts) == len(at_steps)
    for number, attempt in enumerate(state.attempts, 1):
        kept = tmp_path / "out" / "attempts" / str(number)
        assert attempt.attempt == number and (kept / "logs" / "rank_1.log").is_file()
        assert (kept / "metrics.jsonl").is_file() == (attempt.next == "the start")


@pytest.mark.slow
def test_without_room_for_checkpoints_in_memory_a_run_goes_on(inputs, undisturbed, tmp_path):
    console, output = tmp_path / "console", tmp_path / "out"
    job = start(command(inputs, output, "trainer.memory_checkpoint_freq=1"), console)
    try:
        wait_until(lambda: steps_done(output) >= 2, job, console)
        memory = Path(json.loads((output / "job.json").read_text())["memory_dir"])
        memory.rename(memory.with_suffix(".away"))
        memory.touch()
        assert job.wait(200) == 0, console.read_text()
    finally:
        shutil.rmtree(memory.with_suffix(".away"))
        job.kill()
        job.wait()
    check_same(output, undisturbed)
    assert "no more checkpoints in memory in this attempt: the checkpoint of step " in console.read_text()
    assert not memory.exists()


@pytest.mark.slow
def test_torchrun_that_may_restart_goes_on_before_and_after_a_checkpoint(inputs, undisturbed, tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    keys = ("trainer.save_freq=3", "trainer.overwrite=true")
    python, _, *words = command(inputs, tmp_path / "out", *keys)
    console, output = tmp_path / "console", tmp_path / "out"
    job = start([python, "-m", *torchrun, "-m", *words], console)
    try:
        for step in (1, 4):
            wait_until(lambda step=step: steps_done(output) >= step and len(ranks_of(job)) == 2, job, console)
            pids = ranks_of(job)
            os.kill(pids[1], signal.SIGKILL)
            wait_until(lambda pids=pids: pids[0] not in ranks_of(job).values(), job, console)
        assert job.wait(200) == 0, console.read_text()
    finally:
        job.kill()
        job.wait()
    check_same(output, undisturbed)
    assert read_run(output).starts == 2, "the first one has been removed with its results"


@pytest.mark.slow
def test_the_launcher_killed_in_a_second_attempt_takes_all_with_it(inputs, tmp_path):
    console = tmp_path / "console"
    job = start(command(inputs, tmp_path / "out", "trainer.total_training_steps=100000"), console)
    try:
        wait_until(lambda: steps_done(tmp_path / "out") >= 1, job, console)
        os.kill(ranks_of(job)[1], signal.SIGKILL)
        wait_until(lambda: (tmp_path / "out" / "attempts" / "1" / "metrics.jsonl").exists(), job, console)
        wait_until(lambda: steps_done(tmp_path / "out") >= 1, job, console)
        children = psutil.Process(job.pid).children(recursive=True)
        assert len(children) >= 4
    finally:
        job.kill()
        job.wait()
    _, left = psutil.wait_procs(children, timeout=15)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
