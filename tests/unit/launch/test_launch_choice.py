"""Which launcher and device a run uses, which death was the first, what a log keeps of a terminal."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from siirl.errors import CheckpointError, ConfigError, DataError, DeadlineError, WorkerError
from siirl.launch.failure import Death, describe_exception, first_cause, read_failure, write_failure
from siirl.launch.job import Job, choose_launcher
from siirl.launch.output_relay import plain_line
from siirl.launch.process import worker_environment
from siirl.launch.torchrun import is_first_process
from siirl.launch.worker_entry import ProcessPlace, pick_device
from siirl.observe.position import Position

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def config(launcher: str, nnodes: int = 1):
    trainer = SimpleNamespace(launcher=launcher, nnodes=nnodes, memory_checkpoint_freq=-1)
    return SimpleNamespace(trainer=trainer)


@pytest.mark.parametrize(
    ("launcher", "env", "chosen"),
    [
        ("auto", {}, "local"),
        ("auto", TORCHRUN, "torchrun"),
        ("torchrun", TORCHRUN, "torchrun"),
        ("local", TORCHRUN, "local"),
        ("auto", {"RAY_ADDRESS": "h:1"}, "ray"),
        ("auto", TORCHRUN | {"RAY_ADDRESS": "h:1"}, "torchrun"),
        ("local", {"RAY_ADDRESS": "h:1"}, "local"),
        ("ray", {}, "ray"),
    ],
)
def test_the_launcher_follows_the_config_and_the_environment(launcher, env, chosen):
    assert choose_launcher(config(launcher), env) == chosen


def test_several_machines_without_torchrun_need_ray():
    assert choose_launcher(config("auto", nnodes=2), {}) == "ray"
    assert choose_launcher(config("auto", nnodes=2), TORCHRUN) == "torchrun"


def test_launchers_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="MASTER_PORT are not set"):
        choose_launcher(config("torchrun"), {})
    assert is_first_process({}) and not is_first_process(TORCHRUN)


@pytest.mark.parametrize(
    ("wanted", "visible", "expected"),
    [("cpu", 8, "cpu"), ("auto", 0, "cpu"), ("auto", 1, "error"), ("cuda", 0, "error"), ("cuda", 1, "error")],
)
def test_fewer_gpus_than_ranks_are_refused(monkeypatch, wanted, visible, expected):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    place = ProcessPlace(0, 0, 2, 2)
    if expected == "error":
        with pytest.raises(ConfigError, match=rf"n_gpus_per_node=2, but {visible} GPU"):
            pick_device(wanted, place)
    else:
        assert pick_device(wanted, place).type == expected


def death(
    rank: int, returncode: int, seen_s: float, error: BaseException | None = None, time_s: float = 0.0
) -> Death:
    failure = describe_exception(error, rank, None) if error else None
    if failure:
        failure = type(failure)(**{**vars(failure), "time_s": time_s})
    return Death(rank, returncode, seen_s, failure, None)


PEER_LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
CASES = {
    "the earlier of two errors": (
        [death(0, 1, 5, KeyError("a"), 2.0), death(1, 1, 5, KeyError("b"), 1.0)],
        1,
    ),
    "a lost peer comes last": ([death(0, 1, 5, PEER_LOST, 1.0), death(1, 1, 5, KeyError("b"), 2.0)], 1),
    "a kill before an unknown error": ([death(0, 1, 5, OSError("odd"), 1.0), death(2, -9, 5.5)], 2),
    "an abort may be a watchdog's": ([death(0, -6, 1), death(1, 1, 5, KeyError("b"), 2.0)], 1),
    "a deadline only if nothing else": ([death(0, 1, 1, DeadlineError("x"), 1.0), death(1, 3, 2)], 1),
    "all lost their peer": ([death(1, 1, 5, PEER_LOST, 1.0), death(0, 1, 5, PEER_LOST, 2.0)], 1),
    "a segmentation fault": ([death(0, 1, 1, PEER_LOST, 0.5), death(3, -11, 1)], 3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_cause_is_found_among_those_that_followed(case):
    deaths, rank = CASES[case]
    assert first_cause(deaths).rank == rank
    assert first_cause(deaths[::-1]).rank == rank


def test_a_failure_record_keeps_the_place_and_the_users_mistake(tmp_path):
    position = Position(4, "rollout_actor", 0.0)
    plain = describe_exception(KeyError("x"), 2, position)
    assert (plain.node, plain.step, plain.user_error, plain.secondary) == ("rollout_actor", 4, False, False)
    try:
        raise WorkerError("in node") from DataError("no column")
    except WorkerError as error:
        users = describe_exception(error, 0, None)
    assert users.user_error and users.error == "no column" and "WorkerError" in users.traceback
    assert describe_exception(CheckpointError("no space"), 0, None).error == "CheckpointError: no space"
    write_failure(tmp_path / "errors" / "rank_2.json", plain)
    assert read_failure(tmp_path / "errors" / "rank_2.json") == plain
    assert read_failure(tmp_path / "absent.json") is None


def test_a_death_names_its_signal():
    assert Death(0, -signal.SIGSEGV, 0, None, None).signal_name == "SIGSEGV"
    assert Death(0, -77, 0, None, None).signal_name == "signal 77"
    assert Death(0, 1, 0, None, None).signal_name is None


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (b"plain", b"plain"),
        (b"\r\x1b[2K\x1b[1mstep  1\x1b[0m\r", b"step  1"),
        (b"training 10%\rtraining 20%\rdone", b"done"),
        (b"\x1b]0;title\x07text", b"text"),
    ],
)
def test_a_log_keeps_the_text_of_a_line_without_frames_and_colours(raw, kept):
    assert plain_line(raw) == kept


def test_threads_are_shared_unless_the_user_says_otherwise(monkeypatch):
    job = Job({}, "", "/nowhere", 2, 2)
    monkeypatch.setattr("siirl.launch.process.available_cores", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert worker_environment(job, 1, "h", 5)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    env = worker_environment(job, 1, "h", 5)
    assert (env["OMP_NUM_THREADS"], env["RANK"], env["WORLD_SIZE"], env["MASTER_PORT"]) == (
        "3",
        "1",
        "2",
        "5",
    )


def test_a_job_forgets_the_last_run_and_survives_json(tmp_path):
    job = Job({"a": 1}, "{}", str(tmp_path / "out"), 2, 2, {"n": {"k": 1}}, {"x": None})
    job.prepare()
    job.error_path(0).write_text("{}")
    path = job.prepare()
    assert Job.read(path) == job and not job.error_path(0).exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.output_dir=.*cannot be written"):
        Job({}, "", str(tmp_path / "file" / "out"), 1, 1).prepare()


def test_the_launcher_needs_no_torch():
    code = "import sys, siirl.launch.local, siirl.launch.torchrun; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
    assert Path(sys.executable).exists()
