"""The local launcher and torchrun with real processes: every way in which a run can end."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from launch_jobs import alive, environment, make_job, wait_until_dead

from siirl.launch import local, standbys
from siirl.launch.job import Job
from siirl.launch.output_relay import ConsoleTee
from siirl.launch.process import Worker, end_all, lifeline, worker_environment
from siirl.observe.position import PositionFile

LAUNCH = (
    "import sys; from pathlib import Path; from siirl.launch.job import Job;"
    "from siirl.launch.local import run_local; sys.executable = sys.argv[2];"
    "code = run_local(Job.read(Path(sys.argv[1]))); assert 'torch' not in sys.modules; sys.exit(code)"
)
LAUNCHER = [sys.executable, "-m", "launch_written_job"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def write_job(folder: Path, entry: str, *overrides: str) -> Path:
    path = folder / "job.json"
    path.write_text(make_job(folder, entry, "trainer.n_gpus_per_node=2", *overrides).to_json())
    return path


def run(folder: Path, entry: str, *overrides: str) -> subprocess.CompletedProcess:
    return run_words([*LAUNCHER, str(write_job(folder, entry, *overrides))])


def run_words(words: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(words, env=environment(), capture_output=True, text=True)


def log(folder: Path, rank: int) -> str:
    return (folder / "out" / "logs" / f"rank_{rank}.log").read_text()


def test_a_run_that_ends_well_exits_0_and_logs_every_rank(tmp_path):
    done = run(tmp_path, "finish")
    assert done.returncode == 0, done.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"sum=1 dag=launch_test seed=1 cpu threads={threads}" in done.stdout
    assert "tty=False note=hello" in done.stdout and "rank 1 was here" not in done.stdout
    assert "rank 0 was here" in log(tmp_path, 0) and "rank 1 was here" in log(tmp_path, 1)


def test_the_launcher_imports_no_torch(tmp_path):
    """Workers that end at once stand for those that do."""
    words = [sys.executable, "-c", LAUNCH, str(write_job(tmp_path, "finish")), shutil.which("true")]
    done = run_words(words)
    assert done.returncode == 0, done.stderr


FAILURES = {
    "raise_on_rank_1": (1, r"rank 1 .*node 'actor_train', step 3: ZeroDivisionError: the loss fell off"),
    "raise_with_place": (1, r"rank 1 .*node 'function_reward', step 9: WorkerError: node failed"),
    "killed_on_rank_1": (
        1,
        r"(?s)rank 1 .*node 'rollout_actor', step 7: killed by SIGKILL.*out-of-memory killer",
    ),
    "exit_silently": (1, r"rank 1 .*before its first node: exit code 17"),
    "user_error": (2, r"^siirl: train\.parquet has no column 'prompt'\. Add it\.\n$"),
}


SLOW = ("raise_with_place", "exit_silently")  # the choice of the first cause has unit tests too


@pytest.mark.parametrize(
    "entry", [pytest.param(entry, marks=[pytest.mark.slow] * (entry in SLOW)) for entry in FAILURES]
)
def test_the_first_failing_rank_is_named_with_its_node_step_and_cause(tmp_path, entry):
    code, pattern = FAILURES[entry]
    started = time.monotonic()
    done = run(tmp_path, entry, "trainer.max_restarts=0")
    assert time.monotonic() - started < 180  # alone 5 s
    assert done.returncode == code
    assert re.search(pattern, done.stderr), done.stderr
    if entry == "killed_on_rank_1":
        assert "| rank 1 before the kill" in done.stderr
    if entry == "raise_on_rank_1":
        assert "the loss fell off" in log(tmp_path, 1)
        assert json.loads((tmp_path / "out" / "errors" / "rank_1.json").read_text())["node"] == "actor_train"
        assert "| ZeroDivisionError" in done.stderr


def test_a_wait_past_the_deadline_shows_where_the_stuck_rank_is(tmp_path):
    done = run(tmp_path, "time_out", "trainer.deadline_s=3", "trainer.max_restarts=0")
    assert done.returncode == 1
    assert re.search(r"rank 0 .*node 'reshard', step 4", done.stderr), done.stderr
    assert "did not answer in time" in done.stderr
    assert "in time_out" in log(tmp_path, 1)  # the stack of the rank that was waited for


@pytest.mark.slow
def test_killed_workers_are_started_again_until_a_user_error_ends_the_run(tmp_path):
    """Both ranks are killed, then rank 1; the third attempt is the user's fault, and there is no fourth."""
    done = run(tmp_path, "killed_twice", "trainer.max_restarts=5")
    assert done.returncode == 2, done.stderr
    assert re.search(r"attempt 1 failed: rank [01] .*node 'rollout_actor', step 7: killed by", done.stderr)
    assert "attempt 2 failed: rank 1 on " in done.stderr and "attempt 3" not in done.stderr
    assert "(restart 2 of at most 5 without a new checkpoint)" in done.stderr
    assert done.stderr.endswith("siirl: the third time it is the user's fault\n")
    assert "attempt 0" in done.stdout and "attempt 2" in done.stdout, "the console goes on"
    for number in (1, 2):
        kept = tmp_path / "out" / "attempts" / str(number) / "logs" / "rank_0.log"
        assert re.findall(r"rank 0, attempt \d", kept.read_text()) == [f"rank 0, attempt {number - 1}"]


@pytest.mark.parametrize(
    ("entry", "where", "why"),
    [
        ("stopped_once", "node 'reshard', step 5", "it was stopped by a signal (process state T)"),
        pytest.param(
            "stuck_once",
            "node 'rollout', step 3",
            "it has been in 'step/rollout' for",
            marks=pytest.mark.slow,  # who counts as stuck has unit tests
        ),
    ],
)
def test_a_rank_that_lives_but_does_not_go_on_is_named_within_30_s_and_the_run_starts_again(
    tmp_path, entry, where, why
):
    done = run(tmp_path, entry, "trainer.stuck_s=4", "trainer.max_restarts=1")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"attempt 1 failed: rank 1 on \S+, in {where}: {re.escape(why)}", done.stderr), (
        done.stderr
    )
    assert f"  | {' ' * 2}File" in done.stderr and f"in {entry}" in done.stderr, "its stack"
    out = tmp_path / "out"
    (attempt,) = map(json.loads, (out / "attempts.jsonl").read_text().splitlines())
    assert 0 < attempt["ended_s"] - float((out / "moment").read_text()) < 30
    assert "launch_entries.py" in (out / "attempts" / "1" / "logs" / "rank_0.log").read_text(), "who waited"


@pytest.mark.slow
def test_a_process_that_stands_by_becomes_the_next_worker_of_its_rank(tmp_path, monkeypatch):
    """One that does not answer is done without. All end with the launcher."""
    monkeypatch.setattr(standbys, "AFTER_S", 0.0)
    for module in (local, standbys):
        monkeypatch.setattr(module, "worker_environment", partial(worker_environment, base=environment()))
    job = Job.read(write_job(tmp_path, "finish"))
    job_path, tee = str(job.prepare()), ConsoleTee(job.log_path(0))
    run = local.LocalRun(job)
    workers = run.workers
    with contextlib.closing(run.standbys) as ready, lifeline() as fd:
        ready.begin_attempt()
        there = wait_for_standbys(ready)
        os.kill(there[1], signal.SIGSTOP)
        try:
            run.start(job_path, tee, {local.LIFELINE: fd})
            assert [worker.process.pid == there[worker.rank] for worker in workers] == [True, False]
            assert [worker.process.wait(60) for worker in workers] == [0, 0]
        finally:
            end_all(workers)
            tee.close()
        assert "rank 0 was here" in log(tmp_path, 0) and "rank 1 was here" in log(tmp_path, 1)
        ready.look()  # those of the next attempt, which is not to be
        (left,) = ready._there.values()
    wait_until_dead([there[1], left.worker.process.pid], 1)


def test_an_attempt_begins_when_all_that_the_one_before_has_started_is_gone(tmp_path, monkeypatch):
    """A device's memory is free only then."""
    words = ["sh", "-c", "sleep 1 > /dev/null & echo $!"]
    before = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    pid = int(before.communicate()[0])
    run = local.LocalRun(Job.read(write_job(tmp_path, "finish")))
    run.workers = [Worker(0, before)]
    began = []

    def begin(job):
        began.append(alive(pid))
        raise InterruptedError

    monkeypatch.setattr(Job, "prepare", begin)
    with pytest.raises(InterruptedError):
        run.attempt(run.job)
    assert began == [False]


def test_after_a_restart_processes_stand_by_sooner(tmp_path):
    ready = standbys.Standbys(Job.read(write_job(tmp_path, "finish")))
    waits_s = []
    for _ in range(3):
        ready.begin_attempt()
        waits_s.append(ready._wait_s)
    assert waits_s == [standbys.AFTER_S, standbys.AGAIN_S, standbys.AGAIN_S]


def wait_for_standbys(ready: standbys.Standbys) -> dict[int, int]:
    """Until all are ready: the pid of each rank's."""
    deadline = time.monotonic() + 100
    while len(ready._there) < 2 or not all(one.looks_ready() for one in ready._there.values()):
        assert time.monotonic() < deadline
        ready.look()
        time.sleep(0.05)
    return {rank: one.worker.process.pid for rank, one in ready._there.items()}


def start(folder: Path, entry: str) -> tuple[subprocess.Popen, list[int]]:
    """Start a launcher and wait until its workers tell their pids."""
    return wait_for_pids([*LAUNCHER, str(write_job(folder, entry))], folder)


def wait_for_pids(command: list[str], folder: Path) -> tuple[subprocess.Popen, list[int]]:
    launcher = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    files = [folder / "out" / f"pids_{rank}.txt" for rank in range(2)]
    end = time.monotonic() + 90
    while not all(file.exists() for file in files):
        assert time.monotonic() < end and launcher.poll() is None, "the workers did not start"
        time.sleep(0.1)
    return launcher, [int(pid) for file in files for pid in file.read_text().split()]


@pytest.mark.parametrize(
    ("entry", "number", "code"),
    [("wait_politely", signal.SIGINT, 130), ("wait_stubbornly", signal.SIGTERM, 143)],
)
def test_a_signal_ends_the_run_and_leaves_no_orphans(tmp_path, entry, number, code):
    launcher, pids = start(tmp_path, entry)
    started = time.monotonic()
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == code and time.monotonic() - started < 15
    assert f"stopped by {number.name}" in errors
    wait_until_dead(pids, 1)


@pytest.mark.parametrize(
    ("entry", "code"), [("save_when_asked", 130), pytest.param("end_when_asked", 0, marks=pytest.mark.slow)]
)
def test_the_first_ctrl_c_of_a_run_that_saves_nothing_waits_for_a_checkpoint(tmp_path, entry, code):
    launcher, pids = start(tmp_path, entry)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == code, errors
    assert local.SAVES in errors and ("To go on after step 3: siirl resume" in errors) == (code == 130)
    assert not list((tmp_path / "out").glob("amendment*"))
    wait_until_dead(pids, 1)


AT_ONCE = {
    "it saves": ((signal.SIGINT,), 3, "trainer.save_freq=5"),
    "it is before its first step": ((signal.SIGINT,), 0, "trainer.save_freq=-1"),
    "it validates only": ((signal.SIGINT,), 3, "trainer.val_only=true"),
    "another signal": ((signal.SIGTERM,), 3, "trainer.save_freq=-1"),
    "a second one": ((signal.SIGINT, signal.SIGINT), 3, "trainer.save_freq=-1"),
}


@pytest.mark.parametrize("why", AT_ONCE)
def test_a_signal_ends_at_once(tmp_path, why):
    numbers, step, key = AT_ONCE[why]
    run = local.LocalRun(Job.read(write_job(tmp_path, "finish", key)))
    place = run.job.position_path(0)
    place.parent.mkdir(parents=True)
    PositionFile(place).set(step, "actor_train")
    assert not run._is_to_end()
    ends = []
    for number in numbers:
        run.stop(number, None)
        ends.append(run._is_to_end())
    assert ends == [False] * (len(numbers) - 1) + [True]


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_and_their_children_end_when_the_launcher_is_killed(tmp_path, stopped):
    """Stopped ones, too: where a worker hangs, the launcher holds all others."""
    launcher, pids = start(tmp_path, "wait_stubbornly")
    for pid in pids if stopped else ():
        os.kill(pid, signal.SIGSTOP)
    launcher.kill()
    launcher.communicate()
    wait_until_dead(pids, 10)


def test_rank_0_has_a_terminal_when_the_launcher_has_one(tmp_path):
    ours, theirs = os.openpty()
    command = [*LAUNCHER, str(write_job(tmp_path, "finish"))]
    launcher = subprocess.Popen(command, env=environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:
            break
    assert launcher.wait(60) == 0
    assert b"tty=True" in seen
    assert "tty=True note=hello\n" in log(tmp_path, 0)


def torchrun(folder: Path, entry: str, num_processes: int) -> subprocess.CompletedProcess:
    own = [f"--nproc-per-node={num_processes}", "-m", LAUNCHER[-1], str(write_job(folder, entry))]
    return run_words([*TORCHRUN, *own])


def test_torchrun_runs_the_same_job(tmp_path):
    done = torchrun(tmp_path, "finish", 2)
    assert done.returncode == 0, done.stderr
    assert "sum=1 dag=launch_test" in done.stdout


def test_workers_end_soon_after_torchrun_is_killed(tmp_path):
    """A killed torchrun tells its workers nothing."""
    job = str(write_job(tmp_path, "wait_stubbornly"))
    launcher, pids = wait_for_pids([*TORCHRUN, "--nproc-per-node=2", "-m", LAUNCHER[-1], job], tmp_path)
    launcher.kill()
    launcher.communicate()
    wait_until_dead(pids, 10)
