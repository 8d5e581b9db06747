"""Engines that stay when their worker goes: who gets them, in which state, and which of them are ended."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from siirl.config import load_config
from siirl.data.completions import Request, SamplingParams
from siirl.engines.rollout.channel import Channel
from siirl.engines.rollout.served import engine_process, kept_engine
from siirl.engines.rollout.served.engine_child import SERVER
from siirl.engines.rollout.served.engine_parts import find_parts
from siirl.engines.rollout.served.engine_process import EngineLost, EngineProcess
from siirl.engines.rollout.served.journal import BeginUpdate, FinishUpdate, LoadChunk, Sleep, Wake
from siirl.engines.rollout.served.kept_engine import KEEPER_FD, FromKeeper
from siirl.engines.rollout.served.messages import Call, Doubt, Start, Submit
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.errors import RolloutError
from siirl.launch import engine_keeper
from siirl.launch.engine_keeper import EngineKeeper

pytestmark = pytest.mark.heavy
slow = pytest.mark.slow
SUPPORT = Path(__file__).parents[2] / "support"
LONG = SamplingParams(max_tokens=100_000)


class Site:
    """A keeper, and workers that want an engine of it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.life, self._monkeypatch = folder, folder / "life", monkeypatch
        self.log_path = folder / "logs" / "vllm_a_rank_0.log"
        self.keeper = None
        self.open()

    def open(self, *keys):
        self.keeper = EngineKeeper(load_config(list(keys)))
        for name, descriptor in self.keeper.descriptors().items():
            self._monkeypatch.setenv(name, str(descriptor))

    def start(self, **more):
        return Start("kept_native", {"life": str(self.life), **more})

    def process(self, start=None, **environment):
        """An engine's process, of a worker with this environment."""
        paths = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
        keep_for = start or self.start()
        return EngineProcess("a.rollout", paths | environment, self.log_path, 60.0, keep_for)

    def engine(self, start=None, restarts=0, **environment):
        start = start or self.start()
        return RecoveringEngine(lambda: self.process(start, **environment), start, self.log_path, restarts)

    def told(self, *kinds):
        lines = self.life.read_text().splitlines() if self.life.exists() else []
        return [line for line in map(json.loads, lines) if not kinds or line["what"] in kinds]

    def go(self, engine):
        """The worker is gone, as one that was killed; the next attempt is about to begin."""
        engine._process._channel.close()
        engine._process._process._talk.close()
        self.keeper.settle()


@pytest.fixture(scope="module", autouse=True)
def engines_start_soon():
    """A keeper has seconds to start one: the first start of a session waits for what is imported once."""
    subprocess.run([sys.executable, "-m", SERVER, "--help"], stdout=subprocess.DEVNULL, check=True)


@pytest.fixture
def site(tmp_path, monkeypatch):
    made = Site(tmp_path, monkeypatch)
    yield made
    made.keeper.close()
    await_gone({line["pid"] for line in made.told()})


def await_gone(pids):
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sync(engine):
    for event in (BeginUpdate(), LoadChunk({}, {}), FinishUpdate(keeps_kv=True)):
        engine.tell(event)


def generate(engine):
    engine.expect()
    engine.send(Submit([Request("s_0", [5], SamplingParams(max_tokens=2), 0)], None))
    while not (found := engine.listen(1.0)):
        pass
    return found[0].answers


def test_the_next_worker_gets_the_engine_without_requests_and_without_weights(site):
    engine = site.engine()
    sync(engine)
    engine.send(Submit([Request("s_0", [5], LONG, 0)], None))
    engine.call("stats")
    began_s, pid = time.monotonic(), engine.pid
    site.go(engine)
    assert time.monotonic() - began_s < 5 and site.told("renew") == [
        {"pid": pid, "what": "renew", "requests": 1}
    ]
    following = site.engine()
    assert following.pid == pid and len(site.told("start")) == len(site.told("greet")) == 1
    with pytest.raises(RolloutError, match="no weights of this worker"):
        generate(following)
    sync(following)
    assert [one.completion.token_ids for one in generate(following)] == [[7, 7]]
    assert site.told("sleep") == [], "one that its worker never put to sleep stays resident"


@slow
def test_a_long_answer_ends_when_nobody_is_there_to_have_it(site):
    engine = site.engine()
    engine._process.send(Submit([Request("s_0", [5], LONG, 0), Request("s_1", [6], LONG, 0)], None))
    time.sleep(0.3)
    began_s = time.monotonic()
    site.go(engine)
    assert time.monotonic() - began_s < 5 and site.engine().pid == engine.pid


@pytest.mark.parametrize("awake", [True, pytest.param(False, marks=slow)])
def test_an_engine_that_sleeps_at_times_sleeps_while_it_waits_and_once_only(awake, site):
    engine = site.engine()
    engine.tell(Sleep(False))
    engine.tell(Wake("weights"))
    engine.tell(Wake("kv_cache"))
    if not awake:
        engine.tell(Sleep(False))
    site.go(engine)
    assert len(site.told("sleep")) == 2
    following = site.engine()
    assert following.pid == engine.pid
    following.tell(Sleep(False))
    assert len(site.told("sleep")) == 2, "it sleeps already"
    following.tell(Wake("weights"))
    following.tell(Wake("kv_cache"))
    following.tell(Sleep(False))
    assert len(site.told("sleep")) == 3 and len(site.told("wake")) == 4


@slow
def test_an_engine_that_is_lost_after_its_worker_has_found_it_asleep_is_told_what_it_would_have_been(site):
    engine = site.engine(restarts=1)
    engine.tell(Sleep(False))
    site.go(engine)
    following = site.engine(restarts=1)
    following.tell(Sleep(False))
    following.tell(Wake("weights"))
    os.kill(following.pid, signal.SIGKILL)
    sync(following)
    assert following.pid != engine.pid
    assert [line["what"] for line in site.told() if line["pid"] == following.pid] == [
        *("start", "sleep", "wake", "weights")
    ]


@slow
@pytest.mark.parametrize(
    "change",
    [{"environment": {"CUDA_VISIBLE_DEVICES": "1"}}, {"arguments": {"seed": 2}}],
    ids=["environment", "arguments"],
)
def test_an_engine_that_was_started_otherwise_is_ended_before_another_is_started(change, site):
    engine = site.engine()
    site.go(engine)
    following = site.engine(site.start(**change.get("arguments", {})), **change.get("environment", {}))
    assert following.pid != engine.pid and not lives(engine.pid) and len(site.told("start")) == 2
    assert "the engine has been ended: another one is to be started otherwise." in site.log_path.read_text()


def part_of_an_update(engine):
    engine.tell(BeginUpdate())
    engine.tell(LoadChunk({}, {}))


def half_asleep(engine):
    engine.tell(Sleep(False))
    engine.tell(Wake("weights"))


def fails_midway(engine):
    engine.tell(BeginUpdate())
    engine.ask(Doubt())
    engine.tell(FinishUpdate(keeps_kv=True))


def fails(engine):
    with pytest.raises(RolloutError, match="AttributeError"):
        engine.call("unknown")


@slow
@pytest.mark.parametrize(
    "before", [part_of_an_update, fails_midway, half_asleep, fails], ids=lambda before: before.__name__
)
def test_in_every_doubt_a_new_engine_is_started(before, site):
    engine = site.engine()
    before(engine)
    site.go(engine)
    assert not lives(engine.pid) and site.keeper.logs() == set()
    assert "the engine is not fit for another worker: it was not whole" in site.log_path.read_text()
    assert site.engine().pid != engine.pid and len(site.told("start")) == 2


@slow
@pytest.mark.parametrize("fault", ["renew", "greet"])
def test_one_that_does_not_answer_or_cannot_forget_is_replaced(fault, site, monkeypatch, caplog):
    monkeypatch.setattr(engine_process, "GREETING_S", 1.0)
    engine = site.engine(site.start(faults=[fault]))
    site.go(engine)
    following = site.engine(site.start(faults=[fault]))
    assert following.pid != engine.pid and not lives(engine.pid)
    assert ("engine that stayed is given up" in caplog.text) == (fault == "greet")


@slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_one_that_is_struck_while_it_waits_is_replaced_at_once(how, site):
    engine = site.engine()
    site.go(engine)
    os.kill(engine.pid, how)
    time.sleep(0.3)
    began_s = time.monotonic()
    following = site.engine()
    assert following.pid != engine.pid and not lives(engine.pid) and time.monotonic() - began_s < 10


@slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_an_engine_of_several_ranks_stays_while_all_its_processes_do(how, site):
    start = site.start(ranks=2)
    engine = site.engine(start)
    sync(engine)
    parts = find_parts(engine.pid)
    assert {*parts.values()} == {"VLLM::Worker_TP0", "VLLM::Worker_TP1"}
    site.go(engine)
    following = site.engine(start)
    assert following.pid == engine.pid and find_parts(engine.pid).keys() == parts.keys()
    site.go(following)
    victim = max(process.pid for process in parts)
    os.kill(victim, how)
    time.sleep(0.3)
    last = site.engine(start)
    assert last.pid != engine.pid and len(find_parts(last.pid)) == 2
    word = "gone" if how == signal.SIGKILL else "stopped"
    said = f"the engine has been ended: its process {victim} is {word}."
    assert said in site.log_path.read_text() and not lives(engine.pid)
    assert not [process for process in parts if lives(process.pid)], "they end as a group"
    last._process.kill()
    await_gone({process.pid for process in parts})


def idle_engine(child, *parts):
    """As its keeper has it: child: its process; parts: others that it says it needs."""
    ours, theirs = kept_engine.keeper_line()
    numbers = b" ".join(b"%d" % one.pid for one in parts)
    theirs.send(b"idle " + numbers)
    return engine_keeper._Kept("", child, ours), theirs


def ends(process):
    process.kill()
    process.wait()


DECISIONS = {
    "all run": ("", lambda engine, part: None),
    "a part was killed and reaped": ("is gone", lambda engine, part: ends(part)),
    "a part was killed": ("is gone", lambda engine, part: part.kill()),
    "a part is stopped": ("is stopped", lambda engine, part: os.kill(part.pid, signal.SIGSTOP)),
    "the engine is stopped": ("is stopped", lambda engine, part: os.kill(engine.pid, signal.SIGSTOP)),
    "the engine has ended": ("it has ended", lambda engine, part: ends(engine)),
}


@pytest.mark.parametrize(("expected", "strike"), DECISIONS.values(), ids=DECISIONS)
def test_an_engine_is_fit_if_it_is_idle_and_all_its_processes_run(expected, strike):
    engine, part = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    kept, line = idle_engine(engine, part)
    try:
        assert kept.why_unfit() == "", "it has just said so"
        strike(engine, part)
        time.sleep(0.1)
        why = kept.why_unfit()
        assert why.endswith(expected) and bool(why) == bool(expected), why
    finally:
        for process in (engine, part):
            ends(process)
        line.close()


def test_an_engine_is_unfit_while_it_works_and_if_a_part_is_not_the_one_that_it_was(monkeypatch):
    engine, part = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    kept, line = idle_engine(engine, part)
    try:
        assert kept.why_unfit() == ""
        look = engine_keeper.look_at

        def another(pid):
            found = look(pid)
            return dataclasses.replace(found, started=found.started + (pid == part.pid))

        with monkeypatch.context() as patch:
            patch.setattr(engine_keeper, "look_at", another)
            assert kept.why_unfit() == f"its process {part.pid} is gone", "another one has its number"
        connection, other = socket.socketpair()
        assert kept.take(connection.fileno()) and kept.why_unfit() == "it is at work"
        line.send(b"idle")
        assert kept.why_unfit() == "" and kept.parts == {}
        connection.close()
        other.close()
    finally:
        for process in (engine, part):
            ends(process)
        line.close()


@slow
def test_one_that_is_not_idle_in_time_is_ended(site, monkeypatch):
    monkeypatch.setattr(engine_keeper, "SETTLE_S", 0.5)
    engine = site.engine()
    os.kill(engine.pid, signal.SIGSTOP)
    site.go(engine)
    assert not lives(engine.pid) and site.keeper.logs() == set()
    assert "it was not idle 0.5 s after its worker had gone" in site.log_path.read_text()


@slow
def test_the_worker_hears_how_its_engine_ended_and_starts_another_one(site, caplog):
    engine = site.engine(restarts=1)
    first = engine.pid
    os.kill(first, signal.SIGKILL)
    sync(engine)
    assert engine.pid != first and "killed by SIGKILL" in caplog.text
    os.kill(engine.pid, signal.SIGSTOP)
    engine._process.silence_s = 1.0
    with pytest.raises(RolloutError, match=r"silent.* started again 1 times"):
        engine.call("stats")
    assert not lives(engine.pid), "an engine that hung with its worker stays for nobody"


@slow
def test_an_engine_that_cannot_start_stays_for_nobody(site):
    with pytest.raises(RolloutError, match="ModuleNotFoundError"):
        site.engine(Start("no_such_engine", {}))
    deadline = time.monotonic() + 10
    while site.keeper.logs():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@slow
def test_nobody_waits_for_ever(site):
    site.keeper.close()
    site.open("trainer.deadline_s=1")
    engine = site.engine()
    site.go(engine)
    await_gone({engine.pid})
    assert site.keeper.logs() == set()


@slow
def test_engines_end_with_the_run_and_leave_nothing(site):
    engines = [site.engine()]
    site.log_path = site.folder / "logs" / "vllm_a_rank_1.log"
    engines.append(site.engine())
    engines[0].close()
    folders = [Path(psutil.Process(engine.pid).environ()["TMPDIR"]) for engine in engines]
    assert all(folder.is_dir() for folder in folders) and len(site.keeper.logs()) == 2
    site.keeper.close()
    await_gone({engine.pid for engine in engines})
    assert not any(folder.exists() for folder in folders)
    with pytest.raises(EngineLost):
        engines[1]._process.call("stats")


LAUNCHER = """
import os, sys, time
from siirl.config import load_config
from siirl.launch.engine_keeper import EngineKeeper
keeper = EngineKeeper(load_config([]))
(name, descriptor), = keeper.descriptors().items()
os.environ[name] = str(descriptor)
from siirl.engines.rollout.served.engine_process import EngineProcess
from siirl.engines.rollout.served.messages import Start
from pathlib import Path
start = Start("kept_native", {"life": sys.argv[1]})
process = EngineProcess("a", {}, Path(sys.argv[2]), 60.0, start)
process.begin(start)
if sys.argv[3] == "waits":
    process.close()
    keeper.settle()
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["waits", pytest.param("works", marks=slow)])
def test_engines_end_with_a_launcher_that_is_killed(state, tmp_path):
    words = [sys.executable, "-c", LAUNCHER, str(tmp_path / "life"), str(tmp_path / "log"), state]
    paths = {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    launcher = subprocess.Popen(words, env=os.environ | paths, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(launcher.stdout.readline())
        folder = Path(psutil.Process(pid).environ()["TMPDIR"])
        assert folder.is_dir()
    finally:
        launcher.kill()
        launcher.communicate()
    await_gone({pid})
    deadline = time.monotonic() + 20
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@slow
def test_without_restarts_and_without_a_keeper_an_engine_is_its_worker_s_child(site, monkeypatch):
    site.keeper.close()
    monkeypatch.delenv(KEEPER_FD)
    site.open("trainer.max_restarts=0")
    assert site.keeper.descriptors() == {}
    engine = site.engine()
    assert psutil.Process(engine.pid).ppid() == os.getpid() and site.keeper.logs() == set()
    engine.close()
    await_gone({engine.pid})


@slow
@pytest.mark.parametrize("talks", [True, False])
def test_a_keeper_that_does_not_answer_is_done_without(talks, site, monkeypatch):
    """It is stopped, or has gone: the worker starts an engine of its own."""
    monkeypatch.setattr(kept_engine, "ANSWER_S", 1.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setenv(KEEPER_FD, str(theirs.fileno()))
    if not talks:
        ours.close()
    engine = site.engine()
    assert psutil.Process(engine.pid).ppid() == os.getpid() and site.keeper.logs() == set()
    engine.close()
    await_gone({engine.pid})


@slow
def test_what_is_no_call_does_not_disturb_a_keeper(site):
    calls = socket.socket(fileno=os.dup(int(os.environ[KEEPER_FD])))
    calls.send(b"nonsense")
    ours, theirs = socket.socketpair()
    socket.send_fds(calls, [kept_engine.CALL], [theirs.fileno(), theirs.fileno(), theirs.fileno()])
    theirs.close()
    Channel(ours, FromKeeper).send(Call("end", {}))
    assert site.engine().pid in {line["pid"] for line in site.told("start")}
    calls.close()
    ours.close()
