"""What the stream to a vLLM process makes of its replies; the process is a script here."""

import math

import numpy as np
import pytest

from siirl.engines.rollout.base import Completion, Request, SamplingParams
from siirl.engines.rollout.vllm.stream import VLLMStream
from siirl.errors import EpisodeFailed, RolloutError

PARAMS = SamplingParams(max_tokens=3)


class Engine:
    """What a stream asks of its engine."""

    name, weight_version = "agent_0.rollout", 7

    def __init__(self):
        self.prompt_tokens = 0

    def check_requests(self, requests, pending):
        return {r.key: EpisodeFailed("too long", kind="request") for r in requests if len(r.prompt) > 9}

    def count(self, stats, prompt_tokens):
        self.prompt_tokens += prompt_tokens


class Board:
    """Answers the requests of a stream with one token each, by the finish reasons and log-probs given."""

    def __init__(self, *ends):
        self.ends, self.names = ends, []

    def open(self, stream):
        return None

    def submit(self, arrays, first, names, params, adapter):
        self.names += names

    def listen(self, stream, timeout_s):
        reasons, log_probs = zip(*self.ends, strict=True)
        values = {"names": self.names, "finish_reasons": reasons, "stats": {}}
        count = len(self.names)
        arrays = {
            "tokens": np.arange(count),
            "log_probs": np.array(log_probs),
            "lengths": np.ones(count, int),
        }
        return [(values, arrays)]


def stream_of(*ends):
    engine = Engine()
    return VLLMStream(engine, Board(*ends), "float32"), engine


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
