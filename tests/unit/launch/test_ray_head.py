"""A Ray cluster whose head is gone is named before Ray ends the driver; who is cut off ends its workers."""

import contextlib
import socket
import subprocess
import threading
import time

import pytest
from launch_jobs import alive, make_job

from siirl.launch import ray_actor, ray_cluster
from siirl.launch.process import Worker
from siirl.launch.ray_actor import Launch, RankActor
from siirl.launch.ray_cluster import CUT_OFF_S, LOST_AFTER_S, CutOff, HeadLost, HeadWatch


@contextlib.contextmanager
def head_here():
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def soon(monkeypatch):
    """A machine is cut off after a second."""
    for name, value in (("HEAD_EVERY_S", 0.0), ("SUSPECT_S", 0.4), ("CUT_OFF_S", 1.0)):
        monkeypatch.setattr(ray_cluster, name, value)


def test_a_head_that_takes_connections_is_there_and_one_that_does_not_is_named(monkeypatch):
    monkeypatch.setattr(ray_cluster, "HEAD_EVERY_S", 0.0)
    with head_here() as address:
        watch = HeadWatch(address, patience_s=0.5)
        time.sleep(0.6)
        watch.look()
    watch.look()
    time.sleep(0.6)
    with pytest.raises(HeadLost, match=rf"head of the Ray cluster, {address}, has taken no connections"):
        watch.look()


def looks(cut_off: CutOff, seconds: float) -> str:
    """What it says in that time, looking again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if why := cut_off.look():
            return why
        time.sleep(0.02)
    return ""


def test_a_machine_is_cut_off_if_nobody_asks_and_the_head_is_not_there(soon):
    with head_here() as address:
        cut_off = CutOff(address)
        assert looks(cut_off, 1.5) == "", "the driver stands still"
    why = looks(cut_off, 2.0)
    assert why.startswith("this machine is cut off: the driver of the run has asked nothing for ")
    assert address in why


def test_a_driver_that_asks_is_enough(soon):
    with head_here() as address:
        cut_off = CutOff(address)
    for _ in range(20):
        cut_off.asked()
        assert looks(cut_off, 0.1) == ""
    assert looks(cut_off, 0.5) == "" and looks(cut_off, 2.0) != ""


def test_the_driver_gives_up_first():
    assert CUT_OFF_S > LOST_AFTER_S


@pytest.mark.heavy
def test_an_actor_that_is_cut_off_ends_its_worker_and_itself(soon, tmp_path, monkeypatch, capfd):
    started, left = [], threading.Event()

    def start_worker(rank, *_) -> Worker:
        started.append(subprocess.Popen(["sleep", "100"], start_new_session=True))
        return Worker(rank, started[-1])

    monkeypatch.setattr(ray_actor, "start_worker", start_worker)
    monkeypatch.setattr(ray_actor, "end_with_parent", lambda: None)
    monkeypatch.setattr(ray_actor, "WATCH_S", 0.02)
    monkeypatch.setattr(ray_actor, "leave", left.set)
    job, actor = make_job(tmp_path, "none"), RankActor()
    job.prepare()
    with head_here() as address:
        actor.start(Launch(job.to_json(), 0, "127.0.0.1", 1, (), {}, str(tmp_path), head=address))
        assert not left.wait(1.5), "the driver asks nothing, but the head is there"
    for _ in range(20):
        assert actor.poll(0, 0.1).ended is None, "the head is not there, but the driver asks"
    assert not left.is_set() and alive(started[0].pid)
    assert left.wait(10) and not alive(started[0].pid)
    assert "siirl: this machine is cut off" in capfd.readouterr().err
