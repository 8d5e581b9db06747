"""Which ends of a run are followed by another attempt, from where, and what is kept of the one before."""

import dataclasses
import errno
import json
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from siirl.checkpoint.files import POINTER
from siirl.config import load_config, to_dict
from siirl.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    RequestError,
    RewardError,
    RolloutError,
    UserCodeError,
)
from siirl.guarded_files import write_own
from siirl.launch import attempts as attempts_module
from siirl.launch.attempts import ATTEMPTS_FILE, Attempts, Ended, is_no_fault_of_the_user
from siirl.launch.failure import (
    UNRECORDED,
    Death,
    describe_exception,
    first_cause,
    one_line_cause,
    write_failure,
)
from siirl.launch.job import Job
from siirl.launch.memory_checkpoints import step_in
from siirl.launch.outcome import Stop
from siirl.observe.amendments import TAKEN, Amendment, recorded
from siirl.observe.position import Position, PositionFile


def make_attempts(folder: Path, *keys: str) -> Attempts:
    cfg = load_config([f"trainer.output_dir={folder}", "trainer.save_freq=2", *keys])
    job = Job(to_dict(cfg), "{}", str(folder), 2, 2, run_id="this start")
    job.prepare()
    return Attempts(job, lambda: step_in(job.memory_dir))


def save_in_memory(folder: Path, step: int) -> None:
    (folder / "aside").write_text(str(step))
    (folder / "aside").replace(folder / POINTER)


def killed(rank: int = 1, number: int = signal.SIGKILL) -> Death:
    return Death(rank, -number, time.time(), None, Position(7, "rollout", 0.0))


def raised(error: BaseException, rank: int = 1) -> Death:
    return Death(rank, 1, time.time(), describe_exception(error, rank, Position(7, "rollout", 0.0)), None)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def save(folder: Path, step: int) -> None:
    """A checkpoint becomes current."""
    root = folder / "checkpoints"
    (root / f"global_step_{step}").mkdir(parents=True)
    aside = root / "aside"
    aside.write_text(str(step))
    aside.replace(root / POINTER)


BLAMELESS = {
    "SIGKILL": killed(),
    "SIGTERM": killed(number=signal.SIGTERM),
    "SIGSEGV": killed(number=signal.SIGSEGV),
    "SIGABRT": killed(number=signal.SIGABRT),
    "a machine that went away": Death(1, 1, 0.0, None, None, lost="its machine left the Ray cluster"),
    "a peer that went away": raised(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")),
    "a peer that never came": raised(RuntimeError("[gloo/transport/tcp/pair.h:311] Connect timeout [none]")),
    "a deadline": raised(DeadlineError("waited for rank 1")),
    "an engine's process that was killed": raised(
        RolloutError("agent_0 died during 'x': killed by SIGKILL.")
    ),
    "a memory of the device that broke": raised(RuntimeError("CUDA error: uncorrectable ECC error")),
    "a client's request": raised(caused(RequestError("failed"), RuntimeError("CUDA out of memory"))),
    "a disk that broke": raised(OSError(5, "Input/output error")),
}
USERS = {
    "Ctrl-C sent to a worker": killed(number=signal.SIGINT),
    "an exit of its own": Death(1, 3, 0.0, None, None),
    "an error of ours": raised(ZeroDivisionError("division by zero")),
    "out of device memory": raised(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")),
    "a configuration": raised(ConfigError("trainer.x=1: no")),
    "a full disk": raised(OSError(28, "No space left on device")),
    "code of the user that lost a connection": raised(
        caused(UserCodeError("env"), ConnectionResetError("x"))
    ),
    "a service that the reward lost": raised(
        caused(RewardError("sample 3"), ConnectionRefusedError("Connection refused"))
    ),
    "a sample that kills the reward's process": raised(RewardError("it ended: killed by SIGKILL, twice")),
    "a checkpoint that cannot be written": raised(CheckpointError("rank 1: it does not fit")),
}


@pytest.mark.parametrize("case", [*BLAMELESS, *USERS])
def test_only_what_the_same_job_may_survive_is_tried_again(case, tmp_path):
    death = (BLAMELESS | USERS)[case]
    assert is_no_fault_of_the_user(death) == (case in BLAMELESS)
    attempts = make_attempts(tmp_path)
    assert bool(attempts.after([death], {})) == (case in BLAMELESS)
    assert (tmp_path / ATTEMPTS_FILE).exists() == (case in BLAMELESS)


def test_a_kill_that_peers_noticed_first_is_the_cause_and_a_users_error_beside_lost_peers_is_not_retried(
    tmp_path,
):
    lost = raised(RuntimeError("Connection closed by peer"), 0)
    assert "rank 1" in make_attempts(tmp_path / "a").after([lost, killed()], {})
    assert not make_attempts(tmp_path / "b").after([lost, raised(ConfigError("no"))], {})


def test_restarts_count_until_a_checkpoint_comes(tmp_path):
    attempts = make_attempts(tmp_path, "trainer.max_restarts=2")
    told = [attempts.after([killed()], {}) for _ in range(2)]
    assert ["restart 1 of at most 2" in told[0], "restart 2 of at most 2" in told[1]] == [True, True]
    save(tmp_path, 2)
    assert "goes on from global_step_2 (restart 1 of" in attempts.after([killed()], {})
    assert "restart 2 of" in attempts.after([killed()], {}) and attempts.fruitless == 0
    assert attempts.after([killed()], {}) == "" and attempts.fruitless == 2
    lines = [json.loads(line) for line in (tmp_path / ATTEMPTS_FILE).read_text().splitlines()]
    assert [line["attempt"] for line in lines] == [1, 2, 3, 4]
    assert [line["next"] for line in lines] == ["the start"] * 2 + ["global_step_2"] * 2


def test_no_restarts_if_none_are_wanted(tmp_path):
    attempts = make_attempts(tmp_path, "trainer.max_restarts=0")
    assert attempts.after([killed()], {}) == "" and attempts.fruitless == 0


def test_a_restart_older_than_the_window_does_not_count(tmp_path, monkeypatch):
    clock = iter([0.0, 50.0, 50.0, 101.0, 101.0, 102.0])
    attempts = make_attempts(tmp_path, "trainer.max_restarts=2", "trainer.restart_window_s=100")
    monkeypatch.setattr(attempts_module.time, "monotonic", lambda: next(clock))
    attempts._window_s = None
    assert "restart 1 of" in attempts.after([killed()], {})  # at 0
    attempts._window_s = 100.0
    assert "restart 2 of" in attempts.after([killed()], {})  # at 50
    assert "restart 2 of" in attempts.after([killed()], {})  # at 101: the first one is forgotten
    assert attempts.after([killed()], {}) == ""  # at 102


@pytest.mark.parametrize("mode", ["auto", "disable", "resume_path"])
def test_the_next_attempt_takes_this_runs_own_checkpoint_however_the_run_began(mode, tmp_path):
    given = tmp_path / "elsewhere" / "global_step_7"
    given.mkdir(parents=True)
    path = [f"trainer.resume_from_path={given}"] if mode == "resume_path" else []
    attempts = make_attempts(tmp_path / "out", f"trainer.resume_mode={mode}", *path)
    first = str(given) if path else "the start"
    assert f"goes on from {first} (" in attempts.after([killed()], {})
    assert attempts.job.config["trainer"]["resume_mode"] == mode
    save(tmp_path / "out", 8)
    assert "goes on from global_step_8 (" in attempts.after([killed()], {})
    assert attempts.job.config["trainer"]["resume_mode"] == "auto"
    assert attempts.job.run_id == "this start"


def test_what_an_attempt_left_is_kept_and_its_results_too_if_the_next_begins_anew(tmp_path):
    attempts = make_attempts(tmp_path)
    for number, from_start in ((1, True), (2, False)):
        for name in ("metrics.jsonl", "logs/rank_0.log", "logs/siirl.log", "rollouts/train/step_1.txt"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{name} of {number}")
        PositionFile(attempts.job.position_path(1)).set(7, "rollout")
        write_failure(attempts.job.error_path(0), describe_exception(ValueError("x"), 0, None))
        if not from_start:
            save(tmp_path, 2)
        attempts.after([killed()], {})
        kept = tmp_path / "attempts" / str(number)
        assert (kept / "logs" / "rank_0.log").read_text() == f"logs/rank_0.log of {number}"
        assert (kept / "status" / "rank_1").exists() and (kept / "errors" / "rank_0.json").exists()
        for name in ("metrics.jsonl", "rollouts/train/step_1.txt"):
            assert (kept / name).exists() == from_start and (tmp_path / name).exists() != from_start
        assert (tmp_path / "logs" / "siirl.log").exists(), "another file than those of the ranks"
        assert not (tmp_path / "logs" / "rank_0.log").exists()


@pytest.mark.parametrize("mode", ["auto", "disable", "resume_path"])
def test_the_next_attempt_takes_the_newer_of_the_checkpoints_on_disk_and_in_memory(mode, tmp_path):
    given, memory = tmp_path / "elsewhere" / "global_step_7", tmp_path / "memory"
    given.mkdir(parents=True)
    memory.mkdir()
    path = [f"trainer.resume_from_path={given}"] if mode == "resume_path" else []
    cfg = load_config([f"trainer.output_dir={tmp_path}/out", f"trainer.resume_mode={mode}", *path])
    job = Job(to_dict(cfg), "{}", f"{tmp_path}/out", 2, 2, run_id="this start", memory_dir=str(memory))
    job.prepare()
    attempts = Attempts(job, lambda: step_in(job.memory_dir))
    metrics = tmp_path / "out" / "metrics.jsonl"
    metrics.write_text("{}\n")
    save_in_memory(memory, 9)
    told = attempts.after([killed()], {})
    assert "goes on from global_step_9 in memory (restart 1 of" in told
    assert attempts.job.config["trainer"]["resume_mode"] == "auto" and metrics.exists()
    save(tmp_path / "out", 10)
    assert "goes on from global_step_10 (restart 1 of" in attempts.after([killed()], {})
    save_in_memory(memory, 11)
    assert "goes on from global_step_11 in memory (restart 1 of" in attempts.after([killed()], {})
    assert "goes on from global_step_11 in memory (restart 2 of" in attempts.after([killed()], {})


def test_a_user_error_of_which_the_disk_took_no_record_is_known_by_the_exit_code(tmp_path):
    """It ends the run, before the peers that it left alone; an exit of the user's own code is none."""
    file = tmp_path / "file"
    file.write_text("")
    failure = describe_exception(OSError(errno.EROFS, "Read-only file system"), 0, None)
    assert failure.user_error and not write_failure(file / "errors" / "rank_0.json", failure)
    death, peer = Death(1, UNRECORDED, 5.0, None, None), Death(0, 1, 1.0, None, None)
    assert first_cause([peer, death]) is death and death.is_users
    assert not is_no_fault_of_the_user(death) and "took no record" in one_line_cause(death)
    assert not Death(0, 2, 0.0, None, None).is_users


LIMITS = {
    "a thread": (RuntimeError("can't start new thread"), True),
    "memory of Python": (MemoryError(), True),
    "memory of the system": (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
    "memory of torch": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
    "another error": (RuntimeError("no"), False),
    "a socket": (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), False),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_a_limit_refuses_is_told_with_the_limit(name, monkeypatch):
    """`ulimit -v` was called an error of the disk, or of a thread, without a word of the limit."""
    error, met = LIMITS[name]
    limits = {resource.RLIMIT_AS: 3 << 30}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY),) * 2)
    failure = describe_exception(caused(ValueError("on top"), error), 0, None)
    assert failure.user_error == met and not failure.machine_fault
    assert ("`ulimit -v 3145728`" in failure.error and "Raise the limit" in failure.error) == met
    limits.clear()
    monkeypatch.setattr("siirl.launch.failure.Path.read_text", lambda _: "max")
    assert not describe_exception(error, 0, None).user_error  # without a limit it is no fault of the user's


def amended(attempts: Attempts, tmp_path: Path, ended: Callable[[], Ended]) -> list[Job]:
    """The jobs of a run whose first attempt is amended, and whose second one ends so."""
    jobs, config = list[Job](), dict(attempts.job.config)
    config["trainer"] = config["trainer"] | {"seed": 5}
    (tmp_path / "run_config.yaml").write_text("as it was")

    def attempt(job: Job) -> Ended:
        jobs.append(job)
        if len(jobs) == 1:
            save(tmp_path, 3)
            asked = Amendment("1", job.run_id, ["a=1"], ["a"], {"config": config}, "amended")
            write_own(tmp_path / TAKEN, dataclasses.asdict(asked))
        return ended() if len(jobs) == 2 else Ended(job)

    attempts.run(attempt, Stop())
    return jobs


def test_an_amendment_that_a_machine_refuses_before_its_workers_start_is_taken_back(tmp_path, capsys):
    def refused():
        raise ConfigError("on one machine:\nno such file")

    jobs = amended(make_attempts(tmp_path), tmp_path, refused)
    assert [job.config["trainer"]["seed"] for job in jobs] == [1, 5, 1]
    assert (tmp_path / "run_config.yaml").read_text() == "as it was"
    assert "is taken back: on one machine: no such file. The run goes on as before" in capsys.readouterr().err
    assert [one.state for one in recorded(tmp_path)] == ["applied", "withdrawn"]


def test_a_refusal_without_an_amendment_ends_the_run(tmp_path):
    def attempt(_job):
        raise ConfigError("no such file")

    with pytest.raises(ConfigError, match="no such file"):
        make_attempts(tmp_path).run(attempt, Stop())
