"""An engine that comes back: with which weights, adapters, requests and sleep, whenever its process is lost.

The process is a model of the real one: its state follows from what it is told, and it is lost at random.
"""

import hashlib
import logging
import random
import threading
from pathlib import Path

import pytest

from siirl.data.completions import Completion, Request, SamplingParams
from siirl.engines.rollout.served import recovery
from siirl.engines.rollout.served.engine_process import EngineLost
from siirl.engines.rollout.served.journal import BeginUpdate, FinishUpdate, LoadChunk, Sleep, Wake
from siirl.engines.rollout.served.lora_adapters import LoadAdapter
from siirl.engines.rollout.served.messages import (
    UNKNOWN,
    Abort,
    Answer,
    Call,
    Done,
    Finished,
    Pause,
    Paused,
    Start,
    Submit,
)
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.errors import ConfigError, RolloutError

LENGTH = 4


class Adapter(LoadAdapter):
    """Of values that need no folder."""

    def tell(self, process):
        process.call(self.kind, number=self.number, values=self.adapter)


PARAMS = SamplingParams(max_tokens=LENGTH)


class Fate:
    """When the next process is lost: after so many of its messages, before or after it has followed one."""

    def __init__(self, rng, mean):
        self.rng, self.mean, self.num_losses = rng, mean, 0

    def draw(self):
        return self.rng.expovariate(1 / self.mean) if self.mean else float("inf")


class ModelProcess:
    """An engine process whose state can be read, and whose responses follow from it."""

    def __init__(self, fate):
        self.fate, self.left = fate, fate.draw()
        self.started, self.killed = False, False
        self.weights, self.updating, self.adapters = {}, False, {}
        self.awake = {"weights", "kv_cache"}
        self.running, self.unread, self.heard = {}, [], []

    def state(self):
        return self.weights, self.updating, self.adapters, self.awake

    def _live(self):
        assert not self.killed
        self.left -= 1
        if self.left < 0:
            self.fate.num_losses += 1
            raise EngineLost("it died.", "\n  | a line")

    def ask(self, message):
        if self.fate.rng.random() < 0.5:
            self._live()
        for _ in range(self.fate.rng.randrange(3)):
            self._step()
        answer = self._follow(message)
        self._live()
        self.heard, self.unread = self.heard + self.unread, []
        return answer

    def send(self, message):
        self._live()
        assert self.started
        for request in message.requests:
            assert request.key not in self.running
            self.running[request.key] = (request, message.adapter, 0)

    def listen(self, timeout_s):
        found, self.heard = self.heard, []
        try:
            self._live()
            self._step()
            self._live()
        except EngineLost:
            if found:
                return found
            raise
        found, self.unread = found + self.unread, []
        return found

    def forget(self):
        heard, self.heard = self.heard, []
        return heard

    def call(self, method, **arguments):
        return self.ask(Call(method, arguments)).result

    def expect(self):
        pass

    def kill(self):
        self.killed = True

    def _follow(self, message):
        assert self.started == (not isinstance(message, Start))
        match message:
            case Start():
                self.started = True
            case Call(method, arguments):
                getattr(self, f"_{method}")(**arguments)
            case Pause(names):
                stopped = [(*self.running.pop(name), name) for name in names if name in self.running]
                return Paused([self._said(name, one.prompt, ad, n, "paused") for one, ad, n, name in stopped])
            case Abort():
                self.running.clear()
        return Done()

    def _begin_update(self):
        assert "weights" in self.awake and not self.running
        self.updating, self.adapters = True, {}

    def _update(self, bucket):
        assert self.updating
        self.weights |= bucket

    def _finish_update(self):
        assert self.updating
        self.updating = False

    def _load_adapter(self, number, values):
        assert not self.updating
        self.adapters[number] = values

    def _sleep(self, keeps_weights):
        assert not self.running
        self.awake = set()
        if not keeps_weights:
            self.weights, self.adapters = {}, {}

    def _wake(self, part):
        self.awake.add(part)

    def _stats(self):
        pass

    def _step(self):
        for name, (request, adapter, done) in [*self.running.items()]:
            if self.fate.rng.random() < 0.4:
                self.running[name] = (request, adapter, done + 1)
                if done + 1 == LENGTH:
                    del self.running[name]
                    self.unread.append(
                        Finished([self._said(name, request.prompt, adapter, LENGTH, "length")], {})
                    )

    def _said(self, name, prompt, adapter, length, reason="length"):
        """Tokens that depend on all that a response may depend on, and on nothing else."""
        assert self.awake == {"weights", "kv_cache"} and not self.updating
        of = (sorted(self.weights.items()), self.adapters.get(adapter), list(prompt))
        ids = [int(hashlib.sha256(repr((of, i)).encode()).hexdigest()[:6], 16) for i in range(length)]
        return Answer(name, Completion(ids, [-1.0] * length, reason, UNKNOWN), 0)


def play(seed, mean, keeps_weights):
    """A random life of an engine: what it answered, the state at its end, and how often it was lost."""
    fate, rng = Fate(random.Random(seed + 1000), mean), random.Random(seed)
    processes = []

    def make():
        processes.append(ModelProcess(fate))
        return processes[-1]

    engine = None
    while engine is None:  # the first start is not tried again
        try:
            engine = RecoveringEngine(make, Start("", {}), Path("vllm.log"), 10_000)
        except EngineLost:
            continue
    answers, version, adapter = [], 0, None
    engine.tell(Sleep(keeps_weights))
    loaded, asleep = False, True
    for turn in range(30):
        if asleep:
            engine.tell(Wake("weights"))
            asleep = False
        if not keeps_weights or not loaded or rng.random() < 0.2:
            version += 1
            engine.tell(BeginUpdate())
            for name in "abc":
                bucket = {name: rng.random()}
                engine.tell(LoadChunk(bucket, dict(bucket)))
                bucket[name] = None  # the buffer is filled anew; what is kept is not
            engine.tell(FinishUpdate())
            loaded, adapter = True, None
        if keeps_weights and (adapter is None or rng.random() < 0.5):
            for number in (1, 2):
                engine.tell(Adapter("", number, rng.random(), None))
            adapter = 1
        engine.tell(Wake("kv_cache"))
        for _ in range(rng.randrange(3)):
            answers.append(sorted(stream(engine, rng, turn, adapter, answers)))
        if rng.random() < 0.6:
            engine.tell(Sleep(keeps_weights))
            asleep, loaded = True, keeps_weights
    assert [process for process in processes if not process.killed] == [processes[-1]]
    assert len(engine._journal.told) < 20
    return answers, processes[-1].state(), fate.num_losses, engine.drain_restarts()


def stream(engine, rng, turn, adapter, answers):
    """Requests that come bit by bit; all are answered, but those that are paused, or given up."""
    names = [f"s_{turn}.{len(answers)}.{i}" for i in range(rng.randrange(1, 6))]
    ends = rng.choice(["all", "all", "pause", "abort"])
    waiting, found, aside = set(), {}, random.Random(turn)
    for name in names:
        adapter_here = rng.choice([adapter, None])
        engine.send(Submit([Request(name, [rng.randrange(9), len(name)], PARAMS, 7)], adapter_here))
        waiting.add(name)
    while waiting and (ends == "all" or len(found) < 2):
        for _ in range(aside.randrange(3)):
            engine.call("stats")  # what completes meanwhile waits for listen
        for finished in engine.listen(0.0):
            for response in finished.answers:
                assert response.key in waiting, "answered twice, or never asked"
                waiting.remove(response.key)
                found[response.key] = tuple(response.completion.token_ids)
    if ends == "pause" and waiting:
        paused = engine.ask(Pause(sorted(waiting))).answers
        waiting -= {response.key for response in paused}
        for finished in engine.listen(0.0):  # what had completed before
            waiting -= {response.key for response in finished.answers}
        assert not waiting
    elif waiting:
        engine.ask(Abort())
        engine.forget()
        waiting.clear()
    return found.items() if ends == "all" else []


@pytest.mark.parametrize("keeps_weights", [False, True], ids=["weights sleep", "a base with adapters"])
def test_whenever_it_is_lost_an_engine_answers_and_is_what_it_would_have_been(keeps_weights, caplog):
    caplog.set_level(logging.CRITICAL)
    total = 0
    for seed in range(40):
        undisturbed = play(seed, 0, keeps_weights)
        disturbed = play(seed, random.Random(seed).choice([12, 30, 80]), keeps_weights)
        assert undisturbed[2:] == (0, 0)
        assert disturbed[:2] == undisturbed[:2], seed
        total += disturbed[3]
    assert total > 200


def recovering(monkeypatch, max_restarts, why_none="", losses=None):
    """An engine whose process is lost at each call, or at those that are listed."""
    fate = Fate(random.Random(0), 0)

    def make():
        process = ModelProcess(fate)
        ask = process.ask

        def lost(message):
            if isinstance(message, Call) and (losses is None or losses.pop(0)):
                raise EngineLost("it died.", "\n  | a line")
            return ask(message)

        process.ask = lost
        return process

    return RecoveringEngine(make, Start("", {}), Path("out/vllm.log"), max_restarts, why_none)


def test_beyond_the_bound_the_error_names_cause_log_and_key(monkeypatch, caplog):
    engine = recovering(monkeypatch, 2)
    with pytest.raises(RolloutError) as caught:
        engine.tell(Wake("weights"))
    words = (
        "it died. It was started again 2 times within an hour",
        "out/vllm.log",
        "rollout.max_engine_restarts=2",
    )
    assert all(word in str(caught.value) for word in words)
    assert str(caught.value).endswith("\n  | a line")
    assert engine.drain_restarts() == 2 and engine.drain_restarts() == 0
    said = [record.getMessage() for record in caplog.records if "started again (" in record.getMessage()]
    assert ["(1 of 2" in said[0], "(2 of 2" in said[1], len(said)] == [True, True, 2]


@pytest.mark.parametrize(
    ("why_none", "word"),
    [("", r"max_engine_restarts=0 it is not started again\."), ("It spans ranks.", r"It spans ranks\.")],
)
def test_without_restarts_a_loss_ends_the_run(monkeypatch, why_none, word):
    with pytest.raises(RolloutError, match=rf"^it died\. .*{word}\n  \| a line$"):
        recovering(monkeypatch, 0, why_none).tell(Wake("weights"))


def test_restarts_of_an_hour_ago_count_no_more(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(recovery.time, "monotonic", lambda: clock[0])
    engine = recovering(monkeypatch, 1, losses=[True, False, True, False, False, True])
    engine.tell(Wake("weights"))
    clock[0] = 3601.0
    engine.tell(Wake("weights"))
    clock[0] = 7000.0
    with pytest.raises(RolloutError, match="1 times within an hour"):
        engine.tell(Wake("weights"))


def test_an_engine_that_cannot_start_again_says_of_what_it_died_and_why_not(monkeypatch):
    engine = recovering(monkeypatch, 5, losses=[True])

    def refuses():
        raise ConfigError("no memory is left.")

    monkeypatch.setattr(engine, "_make", refuses)
    with pytest.raises(RolloutError, match=r"it died\. It could not be started again: no memory is left\."):
        engine.tell(Wake("weights"))


def test_processes_are_started_by_a_thread_that_outlives_streams(monkeypatch):
    """Linux ends an engine with the thread that started it (PR_SET_PDEATHSIG)."""
    starters = []
    engine = recovering(monkeypatch, 5, losses=[True, False])
    make = engine._make
    monkeypatch.setattr(engine, "_make", lambda: starters.append(threading.current_thread()) or make())
    stream = threading.Thread(target=engine.tell, args=(Wake("weights"),))
    stream.start()
    stream.join()
    assert len(starters) == 1 and starters[0] is not stream and starters[0].is_alive()
