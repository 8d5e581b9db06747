"""What the stream to a vLLM process makes of its replies; the process is a script here."""

import math

import pytest

from siirl.data.completions import Completion, Request, SamplingParams
from siirl.engines.rollout.served.messages import UNKNOWN, Answer, Finished
from siirl.engines.rollout.served.stream import EngineStream, StreamRouter
from siirl.errors import EpisodeFailed, RolloutError

PARAMS = SamplingParams(max_tokens=3)


class Engine:
    """What a stream asks of its engine."""

    name, weight_version = "agent_0.rollout", 7

    def __init__(self):
        self.prompt_tokens, self.stats, self.reread = 0, [], 0

    def check_requests(self, requests, pending):
        return {r.key: EpisodeFailed("too long", kind="request") for r in requests if len(r.prompt) > 9}

    def count(self, answers, prompt_tokens, stats, reread):
        self.prompt_tokens += prompt_tokens
        self.reread += reread
        self.stats.append(stats)


class Board:
    """Answers the requests of a stream with one token each, by the finish reasons and log-probs given."""

    def __init__(self, *ends):
        self.ends, self.names = ends, []

    def open(self, policy):
        return policy

    def submit(self, message, first):
        self.names += [request.key for request in message.requests]

    def listen(self, stream, timeout_s):
        ends = enumerate(zip(self.names, self.ends, strict=True))
        return [Finished([ended(name, i, value, end) for i, (name, (end, value)) in ends], {})]


def ended(name, token, log_prob=-1.0, reason="stop"):
    return Answer(name, Completion([token], [log_prob], reason, UNKNOWN), 0)


def stream_of(*ends):
    engine = Engine()
    return EngineStream(engine, Board(*ends), "float32"), engine


def ask(stream, *lengths):
    stream.submit([Request(f"of {length}", [5] * length, PARAMS, 0) for length in lengths])


def test_a_response_that_is_incomplete_fails_alone():
    stream, engine = stream_of(("stop", -1.0), ("abort", -1.0), ("length", -2.0))
    ask(stream, 2, 3, 4)
    answers = dict(stream.collect(0.0))
    assert answers["of 2"] == Completion([0], [-1.0], "stop", 7)
    assert answers["of 4"] == Completion([2], [-2.0], "length", 7)
    failed = answers["of 3"]
    assert isinstance(failed, EpisodeFailed) and failed.kind == "request" and "abort" in str(failed)
    assert not stream.num_pending and engine.prompt_tokens == 9


def test_a_prompt_that_is_refused_fails_without_the_process():
    stream, _ = stream_of(("stop", -1.0))
    ask(stream, 10)
    assert stream.num_pending == 1
    ((key, failed),) = stream.collect(0.0)
    assert (key, str(failed), stream.num_pending) == ("of 10", "too long", 0)


def test_log_probs_that_are_not_finite_end_the_stream():
    stream, _ = stream_of(("stop", math.nan))
    ask(stream, 2)
    with pytest.raises(RolloutError, match="'of 2' has log-probs that are not finite"):
        stream.collect(0.0)


class Running(Board):
    """Requests that run until they are paused, each with a token by then."""

    def __init__(self):
        self.requests = {}

    def submit(self, message, first):
        self.requests |= {request.key: request for request in message.requests}

    def pause(self, stream, names):
        ended_now = [ended(name, 40 + len(self.requests.pop(name).prompt), reason="paused") for name in names]
        return [Finished(ended_now, {})]

    def listen(self, stream, timeout_s):
        names, self.requests = list(self.requests), {}
        return [Finished([ended(name, 9) for name in names], {})]


def test_nothing_runs_while_a_stream_is_held_and_each_token_is_of_the_weights_of_its_time():
    engine, running = Engine(), Running()
    stream = EngineStream(engine, running, "float32")
    ask(stream, 2, 4)
    for version in (8, 9):
        stream.hold()
        assert not running.requests and stream.num_pending == 2
        engine.weight_version = version
        stream.go_on()
        assert [len(r.prompt) - r.start for r in running.requests.values()] == [2, 4]
    assert [r.params.max_tokens for r in running.requests.values()] == [1, 1]
    answers = dict(stream.collect(0.0))
    assert [(a.token_ids, a.token_versions) for a in answers.values()] == [
        ([42, 43, 9], [7, 8, 9]),
        ([44, 45, 9], [7, 8, 9]),
    ]


class Held(Board):
    """Has sampled one token of each request when it is paused."""

    def __init__(self):
        super().__init__()
        self.submitted = []

    def submit(self, message, first):
        self.submitted += message.requests

    def pause(self, stream, names):
        return [Finished([ended(name, 9, reason="paused") for name in names], {})]


def test_what_is_held_is_asked_again_as_the_end_of_a_prompt_and_counted_as_read_again():
    engine, board = Engine(), Held()
    stream = EngineStream(engine, board, "float32")
    ask(stream, 2)
    for version in (8, 9):
        stream.hold()
        engine.weight_version = version
        stream.go_on()
        ask(stream, version)
    again = stream.pause()
    assert [one.start for one in board.submitted] == [0, 1, 0, 2, 1, 0]
    assert dict(again)["of 2"].token_versions == [7, 8, 9]
    first = dict(again)["of 2"]
    stream.submit([Request("of 2", [5, 5, *first.token_ids], PARAMS, 0, start=3)])
    assert engine.reread == (3 - 1) + (4 - 1) + (9 - 1), "all but the last token of what had been read before"


class Process:
    """What a router asks of the engine's process; what its steps complete is given."""

    def __init__(self, *steps):
        self.steps, self.sent = [*steps], []

    def expect(self):
        return None

    def send(self, message):
        self.sent += [request.key for request in message.requests]

    def listen(self, timeout_s):
        return self.steps.pop(0)


def test_each_stream_of_an_engine_gets_its_own_answers_whoever_listens():
    mixed = Finished([ended("b_0", 1), ended("a_0", 2), ended("gone_0", 3), ended("b_1", 4)], {"gauge": 0.5})
    process, engines = Process([mixed, Finished([ended("a_1", 5)], {})]), {}
    router, streams = StreamRouter(process), {}
    for name in ("a", "b"):
        engines[name] = Engine()
        engines[name].name = name
        streams[name] = EngineStream(engines[name], router, "float32")
        ask(streams[name], 2, 4)
    assert process.sent == ["a_0", "a_1", "b_0", "b_1"]
    found = {name: streams[name].collect(0.0) for name in ("a", "b")}
    tokens = {name: [(key, said.token_ids) for key, said in answers] for name, answers in found.items()}
    assert tokens == {"a": [("of 2", [2]), ("of 4", [5])], "b": [("of 2", [1]), ("of 4", [4])]}
    assert (engines["a"].stats, engines["b"].stats) == ([{}, {}], [{"gauge": 0.5}])
