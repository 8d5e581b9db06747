"""The folder of checkpoints in memory: there while the launcher is, and not a moment longer."""

import contextlib
import os
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
from siirl.launch.memory_checkpoints import (
    SHARED_MEMORY,
    agent_folder,
    keeps_in_memory,
    memory_folder,
    open_folder_of_agent,
)

EVERY_STEP = "trainer.memory_checkpoint_freq=1"
HOLDS_IT = """
import os, signal
from siirl.config import load_config
from siirl.launch.memory_checkpoints import memory_folder
with memory_folder(load_config(["trainer.memory_checkpoint_freq=1"])) as folder:
    print(folder, flush=True)
    signal.pause()
"""

BELOW_AN_AGENT = """
import pathlib
from siirl.config import load_config
from siirl.launch.memory_checkpoints import agent_folder, goes_on_from, open_folder_of_agent
for step in (1, 2):
    folder = agent_folder(load_config(["trainer.memory_checkpoint_freq=1"]))
    open_folder_of_agent(folder)
    print(folder, goes_on_from(folder), flush=True)
    pathlib.Path(folder, f"global_step_{step}").mkdir()
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
    _, left = psutil.wait_procs(started, timeout=60)
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


@pytest.mark.parametrize("key", ["trainer.nnodes=2", "trainer.launcher=ray", "trainer.launcher=torchrun"])
def test_all_launchers_and_several_machines_keep_checkpoints_in_memory(key):
    cfg = load_config([EVERY_STEP, key, "data.train_files=a", "data.val_files=b"])
    check_config(cfg)
    assert keeps_in_memory(cfg)


def start_below_an_agent(script: str, wrapped: bool = False) -> subprocess.Popen:
    """As torchrun starts a worker, which prints a folder; wrapped: by a script of the user's."""
    env = os.environ | {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_MAX_RESTARTS": "3"}
    words = [sys.executable, "-c", script]
    words = ["/bin/sh", "-c", '"$@"; true', "sh", *words] if wrapped else words
    then = "print('done', flush=True); sys.stdin.read()"
    agent = f"import subprocess, sys; subprocess.run({words!r}, env={env!r}); {then}"
    return subprocess.Popen(
        [sys.executable, "-c", agent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "by a script"])
def test_that_of_torchruns_agent_is_found_by_each_attempt_and_ends_with_the_agent(wrapped):
    stale = SHARED_MEMORY / memory_checkpoints.NAME.format(os.getuid(), 1, 17)
    stale.mkdir(0o700, exist_ok=True)
    agent = start_below_an_agent(BELOW_AN_AGENT, wrapped)
    try:
        lines = [agent.stdout.readline().split() for _ in range(3)]
        name = lines[0][0]
        assert lines == [[name, "False"], [name, "True"], ["done"]], "not made again, and found"
        assert Path(name).stat().st_mode & 0o777 == 0o700 and not stale.exists()
    finally:
        agent.kill()
        agent.communicate()
    assert is_gone(Path(name))


def test_a_folder_of_somebody_else_is_not_used(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="another user's"):
        open_folder_of_agent(str(tmp_path))


def test_without_an_agent_nothing_outlives_the_workers():
    with pytest.raises(ConfigError, match=r"memory_checkpoint_freq=1, but no torchrun has started this"):
        agent_folder(load_config([EVERY_STEP]), {"RANK": "0"})
    assert agent_folder(load_config([EVERY_STEP]), {"TORCHELASTIC_MAX_RESTARTS": "0"}) == ""
    assert agent_folder(load_config([]), {}) == ""


def test_it_is_told_where_it_has_no_effect():
    (told,) = [
        line
        for line in effect_warnings(load_config([EVERY_STEP, "trainer.max_restarts=0"]))
        if "memory" in line
    ]
    assert told == "trainer.memory_checkpoint_freq=1 has no effect: trainer.max_restarts is 0."
