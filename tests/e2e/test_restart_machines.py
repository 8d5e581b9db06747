"""Two machines, both of them this one, of which one is lost with its memory: the run goes on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import torch
from held_ports import held_port, is_listening
from job_harness import Inputs, overrides
from killed_jobs import ranks_of, start, steps_done, wait_until
from launch_jobs import ROOT
from ray_lock import cluster_here, ray_to_ourselves
from test_restart_job import KEYS, check_same, inputs, results, undisturbed  # noqa: F401

from siirl.checkpoint.files import saved_steps
from siirl.cli import main

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
MEMORY, MARK = Path("/dev/shm"), "SIIRL_TEST_OF"
IN_MEMORY = ("trainer.memory_checkpoint_freq=1", "trainer.save_freq=-1")
MACHINES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", *IN_MEMORY)


def await_gone(folders: Iterable[Path]) -> None:
    deadline = time.monotonic() + 60
    while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [folder for folder in folders if folder.exists()] == []


def marked(mark: str, *words: str) -> list[psutil.Process]:
    """Processes whose environment has the mark of this test, and whose command has these words."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and set(words) <= set(process.cmdline()):
                found.append(process)
    return found


def end_with_all(process: subprocess.Popen) -> None:
    """As a machine that loses its power: the agent, and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


@pytest.fixture
def shared_by_nobody(monkeypatch):
    """Agents of torchrun do not keep a store for the workers: one that comes later would never find it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def port():
    """Where agents meet."""
    with held_port() as held:
        yield held


def start_agents(nnodes: str, port: int, keys: list[str], consoles: list[Path]) -> tuple[list[str], list]:
    """A command that is started on each machine; it, started on two. The first one has rank 0."""
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", "--nproc-per-node=1"]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run"]
    agent += ["--rdzv-conf=last_call_timeout=15", "--local-addr=127.0.0.1", "--max-restarts=5"]
    words = [*agent, "-m", "siirl.main_dag", *keys, "trainer.overwrite=true"]
    first = start(words, consoles[0])
    wait_until(lambda: is_listening(port), first, consoles[0])
    return words, [first, start(words, consoles[1])]


def folders_of_agents(agents: list[subprocess.Popen]) -> list[Path]:
    return [folder for agent in agents for folder in MEMORY.glob(f"siirl-torchrun-*-{agent.pid}-*")]


@pytest.mark.usefixtures("shared_by_nobody")
def test_an_agent_of_torchrun_is_lost_and_another_takes_its_place(port, inputs, undisturbed, tmp_path):  # noqa: F811
    output = tmp_path / "out"
    consoles = [tmp_path / f"console_{index}" for index in range(3)]
    words, agents = start_agents("2", port, overrides(inputs, output, *KEYS, *MACHINES), consoles)
    try:
        wait_until(lambda: steps_done(output) >= 3, agents[0], consoles[0])
        assert ranks_of(agents[1]).keys() == {1}
        folders = folders_of_agents(agents)
        assert len(folders) == 2
        (worker,) = ranks_of(agents[0]).values()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: steps_done(output) >= 5, agents[0], consoles[0])
        end_with_all(agents[1])
        agents.append(start(words, consoles[2]))
        assert agents[0].wait(300) == 0, "\n".join(x.read_text() for x in consoles)
        assert agents[2].wait(60) == 0
    finally:
        for one in agents:
            end_with_all(one)
    await_gone(folders)
    check_same(output, undisturbed)
    told = "\n".join(console.read_text() for console in consoles)
    assert told.count("resumed from /dev/shm/siirl-torchrun-") == 2, told


@pytest.mark.usefixtures("shared_by_nobody")
def test_an_agent_of_torchrun_is_gone_and_the_others_go_on(port, inputs, undisturbed, tmp_path):  # noqa: F811
    output, consoles = tmp_path / "out", [tmp_path / f"console_{index}" for index in range(2)]
    keys = ("trainer.nnodes=1:2", "trainer.n_gpus_per_node=1", *IN_MEMORY)
    _, agents = start_agents("1:2", port, overrides(inputs, output, *KEYS, *keys), consoles)
    try:
        wait_until(lambda: steps_done(output) >= 3, agents[0], consoles[0])
        assert world_size_of(output) == 2
        end_with_all(agents[1])
        assert agents[0].wait(300) == 0, consoles[0].read_text()
    finally:
        for one in agents:
            end_with_all(one)
    assert world_size_of(output) == 1 and "resumed from /dev/shm/" in consoles[0].read_text()
    check_close(output, undisturbed)


def world_size_of(output: Path) -> int:
    return json.loads((output / "job.json").read_text())["world_size"]


def check_close(output: Path, undisturbed) -> None:  # noqa: F811
    """Each step once, and weights that differ by the order of sums."""
    lines, weights = results(output)
    assert [line["step"] for line in lines] == list(range(9))
    assert weights.keys() == undisturbed[1].keys()
    for name, tensor in undisturbed[1].items():
        torch.testing.assert_close(weights[name].float(), tensor.float(), atol=1e-4, rtol=1e-3, msg=name)


@contextlib.contextmanager
def ray_cluster(mark: str):
    added = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", MARK: mark}
    with ray_to_ourselves(), pytest.MonkeyPatch.context() as patch:
        for name, value in added.items():
            patch.setenv(name, value)
        with cluster_here() as cluster:
            cluster.add_node(num_cpus=1, include_dashboard=False)
            yield cluster


def ray_words(cluster, inputs: Inputs, output: Path, *keys: str) -> list[str]:  # noqa: F811
    ray = ("trainer.launcher=ray", f"ray_init.address={cluster.address}", "ray_init.wait_s=60")
    return [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, output, *KEYS, *ray, *keys)]


def lose(cluster, node, mark: str) -> None:
    """As a machine that loses its power, in the midst of a step."""
    for worker in marked(mark, "siirl.launch.worker_entry"):
        worker.suspend()
    cluster.remove_node(node, allow_graceful=False)


def attempts_of(output: Path) -> list[dict]:
    path = output / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_machine_of_a_ray_cluster_is_lost_and_another_takes_its_place(inputs, undisturbed, tmp_path):  # noqa: F811
    output, console = tmp_path / "out", tmp_path / "console"
    with ray_cluster(str(tmp_path)) as cluster:
        second = cluster.add_node(num_cpus=1, include_dashboard=False)
        job = start(ray_words(cluster, inputs, output, *MACHINES), console)
        try:
            wait_until(lambda: steps_done(output) >= 3, job, console)
            folders = folders_of(str(tmp_path))
            assert len(folders) == 2
            workers = marked(str(tmp_path), "siirl.launch.worker_entry")
            assert len(workers) == 2
            workers[0].kill()
            wait_until(lambda: len(attempts_of(output)) == 1 and steps_done(output) >= 5, job, console)
            lose(cluster, second, str(tmp_path))
            cluster.add_node(num_cpus=1, include_dashboard=False)
            assert job.wait(300) == 0, console.read_text()
        finally:
            job.kill()
            job.wait()
        await_gone(folders)
    check_same(output, undisturbed)
    told = [attempt["next"] for attempt in attempts_of(output)]
    assert len(told) == 2 and all(next.endswith(" in memory") for next in told), told
    assert saved_steps(output / "checkpoints") == []


@pytest.mark.parametrize("kept", [IN_MEMORY, ("trainer.save_freq=2",)], ids=["in memory", "on disk"])
def test_a_machine_of_a_ray_cluster_is_gone_and_the_others_go_on(
    kept,
    inputs,  # noqa: F811
    undisturbed,  # noqa: F811
    tmp_path,
    capsys,
):
    output, console = tmp_path / "out", tmp_path / "console"
    elastic = ("trainer.nnodes=1:2", "trainer.n_gpus_per_node=1", *kept)
    with ray_cluster(str(tmp_path)) as cluster:
        second = cluster.add_node(num_cpus=1, include_dashboard=False)
        job = start([*ray_words(cluster, inputs, output, *elastic), "ray_init.wait_s=20"], console)
        try:
            wait_until(lambda: steps_done(output) >= 3, job, console)
            assert world_size_of(output) == 2
            lose(cluster, second, str(tmp_path))
            assert job.wait(300) == 0, console.read_text()
        finally:
            job.kill()
            job.wait()
    told = console.read_text()
    assert "siirl: the run does with 1 of 2 machines (1 rank): the Ray cluster " in told, told
    (attempt,) = attempts_of(output)
    assert attempt["world_size"] == 2 and attempt["next"].startswith("global_step_")
    assert main(["watch", str(output), "--once"]) == 0
    assert re.search(r"1  .* ago with 2 ranks, rank \d", capsys.readouterr().out)
    assert world_size_of(output) == 1
    check_close(output, undisturbed)


def folders_of(mark: str) -> list[Path]:
    """Of checkpoints in memory, by the processes that look after them."""
    return [Path(process.cmdline()[-1]) for process in marked(mark, "siirl-keeper")]
