"""What listens while a run goes on: nothing for other machines, and no name that another user may open."""

import os
import socket
import stat
import sys
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides
from killed_jobs import start, steps_done, wait_until
from ray_lock import ray_to_ourselves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
KEYS = ("trainer.total_training_steps=500", "trainer.test_freq=-1", "trainer.export_hf=false")
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_seqs=64", "trainer.deadline_s=240")
TWO = ("trainer.n_gpus_per_node=2", "trainer.memory_checkpoint_freq=1")
SHARED = (*VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2", *TWO)
JOBS = {"two ranks": TWO, "vLLM": VLLM, "vLLM of two ranks": SHARED, "Ray": ("trainer.launcher=ray", *TWO)}


def listening(processes: list[psutil.Process], rays: Collection[int] = ()) -> list[tuple[str, str]]:
    """(process, address) of all TCP sockets that take connections, and of all UNIX sockets with a name.

    Without the ports of Ray's own processes, which ask for a token, and cannot be had on loopback.
    """
    found = []
    for process in processes:
        try:
            name, sockets = process.name(), process.net_connections("all")
            of_ray = process.pid in rays or name.startswith("ray::") or "/ray/" in "".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        for one in sockets:
            if one.family == socket.AF_UNIX and one.laddr:
                found.append((name, one.laddr))
            elif of_ray:
                continue
            elif one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and one.laddr):
                found.append((name, one.laddr.ip if one.laddr else one.laddr))
    return found


def is_closed(address: str) -> bool:
    """Whether nobody else comes to it: loopback, or a file in a folder that is this user's alone."""
    if not address.startswith("/"):
        return address in ("127.0.0.1", "::1")  # names without a file, "@...", are open to all users
    folders = [Path(address).parent, *Path(address).parent.parents]
    return any(
        folder.stat().st_uid == os.getuid() and not stat.S_IMODE(folder.stat().st_mode) & 0o077
        for folder in folders
    )


@pytest.fixture
def own_cluster():
    """Nobody ends the cluster that a test starts."""
    with ray_to_ourselves():
        yield


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.parametrize("name", JOBS)
def test_nothing_of_a_run_on_one_machine_is_open_to_others(tmp_path, name, monkeypatch):
    inputs = Inputs.make(tmp_path / "inputs")
    make_tiny_model_dir(inputs.model, init_std=0.2, head_dim=32)  # vLLM's CPU attention has no smaller heads
    console, output = tmp_path / "console", tmp_path / "out"
    words = [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, output, *KEYS, *JOBS[name])]
    monkeypatch.delenv("TMPDIR", raising=False)  # pytest's own folders are private: those of users are not
    monkeypatch.setenv("HOME", str(tmp_path))
    job = start(words, console)
    try:
        wait_until(lambda: steps_done(output) >= 1, job, console)
        tree = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        found = listening(tree, [job.pid] if name == "Ray" else [])
        assert ("python", "127.0.0.1") in [(one[0][:6], one[1]) for one in found], (
            "a run has a store at least"
        )
        assert [one for one in found if not is_closed(one[1])] == []
        assert not (tmp_path / ".ray").exists(), "Ray's token is there for all users to read"
    finally:
        job.terminate()
        job.wait(60)
