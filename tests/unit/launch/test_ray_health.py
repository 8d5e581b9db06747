"""The watch of a Ray run over workers that live and do not go on. Without Ray: actors are objects here."""

import concurrent.futures
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from launch_jobs import environment, make_job

from siirl.launch import ray_actor, ray_watch
from siirl.launch.health import STOPPED_S, Process
from siirl.launch.outcome import Stop
from siirl.launch.process import Worker
from siirl.launch.ray_actor import Host, Launch, RankActor
from siirl.launch.ray_cluster import Node
from siirl.launch.ray_watch import Rank, RankWatch, RayHealth
from siirl.observe.heartbeat import Beat, Place
from siirl.observe.position import read_position

WORKER = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from siirl.observe import heartbeat
from siirl.observe.position import PositionFile

rank, status = int(sys.argv[1]), Path(sys.argv[2])
heartbeat.start_heartbeat(rank)
faulthandler.register(signal.SIGUSR1, all_threads=True)
position = PositionFile(status / f"rank_{rank}")
position.set(5, "reshard")
heartbeat.current_heartbeat().begin_part(5, "step")

def waits_to_be_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.01)  # where it shows its stack
    position.set(5, "actor_train")
    (status.parent / "went_on").touch()

def waits_for_the_other():
    heartbeat.current_heartbeat().enter("reshard", (1,))
    time.sleep(100)

waits_to_be_stopped() if rank == 1 else waits_for_the_other()
time.sleep(100)
"""


class Remote:
    """An actor that lives in this process."""

    def __init__(self, actor: RankActor, pool: concurrent.futures.Executor):
        self._actor, self._pool = actor, pool

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *args: self._pool.submit(getattr(self._actor, name), *args))


def wait(refs, num_returns, timeout):
    done, rest = concurrent.futures.wait(refs, timeout)
    return list(done), list(rest)


@pytest.fixture
def ray(monkeypatch):
    context = SimpleNamespace(gcs_address="127.0.0.1:1")
    fake = SimpleNamespace(
        wait=wait, get=lambda ref: ref.result(), get_runtime_context=lambda: context, exceptions=None
    )
    errors = SimpleNamespace(ActorUnavailableError=ConnectionError, RayError=OSError)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    monkeypatch.setattr(ray_watch.HeadWatch, "look", lambda self: None)
    monkeypatch.setattr(ray_actor, "end_with_parent", lambda: None)


def start_worker(rank, job, env, output, fds, stdin, cwd) -> Worker:
    from siirl.launch.job import Job

    status = Job.from_json(stdin.read()).position_path(rank).parent
    words = [sys.executable, "-c", WORKER, str(rank), str(status)]
    process = subprocess.Popen(
        words, env=env, stdout=output, stderr=output, pass_fds=fds, start_new_session=True
    )
    return Worker(rank, process)


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_stopped_worker_is_named_with_who_waits_and_what_both_were_doing(tmp_path, monkeypatch, ray):
    monkeypatch.setattr(ray_actor, "start_worker", start_worker)
    job = make_job(tmp_path, "none", "trainer.nnodes=2", "trainer.n_gpus_per_node=1")
    job.prepare()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        actors = [RankActor() for _ in range(2)]
        node, host = Node("0", "here", "127.0.0.1", 2.0, 0.0), Host("here", 0, ())
        ranks = [Rank(rank, Remote(actor, pool), node, host) for rank, actor in enumerate(actors)]
        console = SimpleNamespace(write=job.log_path(0).open("ab", 0).write, window_size=lambda: b"")
        try:
            for rank, actor in enumerate(actors):
                actor.start(Launch(job.to_json(), rank, "127.0.0.1", 1, (), environment(), str(tmp_path)))
            began_s = time.monotonic()
            (death,) = RankWatch(job, ranks, console, Stop()).until_ended()
            took_s = time.monotonic() - began_s
        finally:
            for actor in actors:
                actor.stop()
    assert death.rank == 1 and death.lost.startswith("it was stopped by a signal (process state T)")
    assert death.lost.endswith("; ahead of it, and waiting: 0") and death.host == "here"
    assert (death.position.node, death.position.step) == ("reshard", 5), "where it stopped"
    assert read_position(job.position_path(1)).node == "actor_train", "it went on for its stack"
    assert STOPPED_S <= took_s < 30
    assert "in waits_to_be_stopped" in job.log_path(1).read_text()
    assert "in waits_for_the_other" in job.log_path(0).read_text()


@pytest.mark.parametrize(("answers", "named"), [(True, True), (False, False)])
def test_time_in_which_an_actor_did_not_answer_is_no_silence_of_its_worker(monkeypatch, answers, named):
    """All news stay the same: those of rank 1 because its actor does not answer, or in earnest."""
    from siirl.launch import ray_watch

    now_s = 1000.0
    monkeypatch.setattr(ray_watch, "time", SimpleNamespace(monotonic=lambda: now_s))
    node, host = Node("0", "here", "127.0.0.1", 2.0, 0.0), Host("here", 0, ())
    beat = Beat(3, 3, Place((5, 0), 5, "step", 2, 1.0))
    ranks = [Rank(rank, None, node, host, beat=beat, process=Process("S", 1.0)) for rank in (0, 1)]
    health, found = RayHealth(600.0), None
    for _ in range(60):
        now_s += 1.0
        ranks[0].replied_s = now_s
        ranks[1].replied_s = now_s if answers else 1000.5
        found = found or health.trouble(ranks)
    assert bool(found) == named
    if found:
        assert "no heartbeat" in found.what
