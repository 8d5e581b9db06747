"""The folder of checkpoints in memory: there while the launcher is, and not a moment longer."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from siirl.config import load_config
from siirl.config.checks import check_config
from siirl.config.effects import effect_warnings
from siirl.errors import ConfigError
from siirl.launch import memory_checkpoints
from siirl.launch.launcher_choice import choose_launcher
from siirl.launch.memory_checkpoints import memory_folder

EVERY_STEP = "trainer.memory_checkpoint_freq=1"
HOLDS_IT = """
import os, signal
from siirl.config import load_config
from siirl.launch.memory_checkpoints import memory_folder
with memory_folder(load_config(["trainer.memory_checkpoint_freq=1"])) as folder:
    print(folder, flush=True)
    signal.pause()
"""


def is_gone(folder: Path) -> bool:
    deadline = time.monotonic() + 20
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not folder.exists()


def keeper_of(folder: str, launcher: int | None = None) -> psutil.Process:
    """The process that looks after it; for a moment after its start it has no command line yet."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for child in psutil.Process(launcher).children():
            if folder in child.cmdline():
                return child
        time.sleep(0.01)
    raise AssertionError("nobody looks after it")


def test_it_is_this_users_alone_and_goes_with_what_is_in_it():
    with memory_folder(load_config([EVERY_STEP])) as name:
        folder = Path(name)
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "global_step_1").mkdir()
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_it_goes_also_if_the_process_that_looks_after_it_is_gone_or_stopped(number):
    with memory_folder(load_config([EVERY_STEP])) as name:
        keeper = keeper_of(name)
        started = [keeper, *keeper.children()]
        keeper.send_signal(number)
    assert not Path(name).exists()
    _, left = psutil.wait_procs(started, timeout=10)
    assert left == []


@pytest.mark.heavy
@pytest.mark.parametrize("stopped", [False, True], ids=["", "and the process that looks after it is stopped"])
def test_it_goes_when_the_launcher_is_killed(stopped):
    launcher = subprocess.Popen([sys.executable, "-c", HOLDS_IT], stdout=subprocess.PIPE, text=True)
    try:
        folder = Path(launcher.stdout.readline().strip())
        assert folder.is_dir()
        keeper = keeper_of(str(folder), launcher.pid)
        if stopped:
            keeper.suspend()
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    try:
        assert is_gone(folder)
        assert psutil.wait_procs([keeper], timeout=20)[1] == []
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            keeper.kill()


@pytest.mark.parametrize("keys", [[], ["trainer.max_restarts=0"], ["trainer.val_only=true"]], ids=str)
def test_there_is_none_for_a_run_that_does_not_go_on_from_it(keys):
    wanted = [EVERY_STEP, *keys] if keys else []
    with memory_folder(load_config(wanted)) as name:
        assert name == ""


def test_a_machine_without_such_memory_is_told(monkeypatch):
    monkeypatch.setattr(memory_checkpoints, "SHARED_MEMORY", Path("/dev/null"))
    with pytest.raises(ConfigError, match=r"memory_checkpoint_freq=1: /dev/null, .*save_freq for check"):
        memory_folder(load_config([EVERY_STEP])).__enter__()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trainer.nnodes=2", "share no memory"),
        ("trainer.launcher=ray", "belong to the local launcher"),
        ("trainer.launcher=torchrun", "belong to the local launcher"),
    ],
)
def test_other_launchers_and_several_machines_are_refused(key, words):
    cfg = load_config([EVERY_STEP, key, "data.train_files=a", "data.val_files=b"])
    with pytest.raises(ConfigError, match=f"trainer.memory_checkpoint_freq=1 with {key}: .*{words}"):
        check_config(cfg)


@pytest.mark.parametrize(
    "env", [{"RAY_ADDRESS": "auto"}, dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "1")]
)
def test_a_launcher_that_the_environment_chooses_is_refused(env):
    with pytest.raises(ConfigError, match=r"memory_checkpoint_freq=1, but (ray|torchrun) starts the workers"):
        choose_launcher(load_config([EVERY_STEP]), env)
    assert choose_launcher(load_config([EVERY_STEP, "trainer.launcher=local"]), env) == "local"


def test_it_is_told_where_it_has_no_effect():
    (told,) = [
        line
        for line in effect_warnings(load_config([EVERY_STEP, "trainer.max_restarts=0"]))
        if "memory" in line
    ]
    assert told == "trainer.memory_checkpoint_freq=1 has no effect: trainer.max_restarts is 0."
