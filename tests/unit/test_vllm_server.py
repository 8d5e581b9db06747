"""When the process of a vLLM engine lets requests of the stream join; the engine is a script here."""

from types import SimpleNamespace

import numpy as np

from siirl.engines.rollout.vllm_server import JOINS_PER_RESPONSE, Server


class Channel:
    def __init__(self):
        self.sent = []

    def send(self, kind, arrays=None, **values):
        self.sent.append((kind, values))


class Engine:
    """Runs each request for as many steps as its parameters say; writes down what it did."""

    def __init__(self):
        self.left, self.joined, self.num_steps, self.aborted = {}, {}, 0, []

    def add(self, name, prompt, params, seed, adapter):
        if prompt == [666]:
            raise ValueError("a prompt that vLLM refuses")
        self.left[name] = [params.max_tokens, params.max_tokens]
        self.joined[name] = self.num_steps

    def step(self):
        self.num_steps += 1
        for left in self.left.values():
            left[0] -= 1
        over = [name for name, (left, _) in self.left.items() if not left]
        return [
            SimpleNamespace(
                request_id=name,
                token_ids=[0] * self.left.pop(name)[1],
                log_probs=[],
                finish_reason="length",
                num_cached_tokens=0,
            )
            for name in over
        ]

    def stats(self):
        return {"steps": self.num_steps}

    def abort(self, names):
        self.aborted += names


def server_with_engine():
    channel = Channel()
    server = Server(channel)
    server._engine = Engine()
    return server, server._engine, channel


def submit(server, name, num_tokens, prompt=(1, 2)):
    arrays = {"prompts": np.array(prompt), "prompt_lengths": np.array([len(prompt)]), "seeds": np.array([0])}
    values = {"names": [name], "params": [{"max_tokens": num_tokens}], "adapter": None}
    server._guarded("stream_error", server._submit, values, arrays)


def advance(server, steps=1):
    for _ in range(steps):
        server._guarded("stream_error", server._advance)


def learn_length(server, num_tokens):
    """Let responses of one length end, so that it is the mean."""
    for index in range(200):
        submit(server, f"before{index}", num_tokens)
    advance(server, num_tokens)


def test_requests_join_at_once_while_nothing_is_known_and_when_nothing_runs():
    server, engine, _ = server_with_engine()
    submit(server, "a", 50)
    advance(server)
    submit(server, "b", 2)
    advance(server, 49)
    assert engine.joined == {"a": 0, "b": 1} and not engine.left
    learn_length(server, 5 * JOINS_PER_RESPONSE)
    before = engine.num_steps
    submit(server, "c", 1)
    advance(server)
    assert engine.joined["c"] == before


def test_requests_join_in_groups_while_others_run():
    server, engine, channel = server_with_engine()
    learn_length(server, 5 * JOINS_PER_RESPONSE)
    begin = engine.num_steps
    submit(server, "long", 100)
    for index in range(20):
        advance(server)
        submit(server, f"later{index}", 100)
    advance(server, 10)
    later = [engine.joined[f"later{index}"] - begin for index in range(20)]
    assert set(later) <= set(range(4, 40, 4)) and sorted(later) == later
    waits = [joined - submitted for submitted, joined in enumerate(later, 1)]
    assert min(waits) >= 0 and max(waits) < 5, "a short wait"
    ended = [names for kind, values in channel.sent if kind == "finished" for names in values["names"]]
    assert len(ended) == 200


def test_counters_are_told_with_the_last_response_only():
    server, _, channel = server_with_engine()
    learn_length(server, 5 * JOINS_PER_RESPONSE)
    channel.sent.clear()
    submit(server, "a", 2)
    advance(server)
    submit(server, "b", 2)
    advance(server, 4)
    told = ["steps" in values["stats"] for kind, values in channel.sent if kind == "finished"]
    assert told == [False, True]


def test_a_request_that_vllm_refuses_ends_those_that_run_and_wait():
    server, engine, channel = server_with_engine()
    submit(server, "a", 50)
    advance(server)
    submit(server, "b", 50, prompt=[666])
    submit(server, "c", 50)
    advance(server)
    ((_, values),) = [sent for sent in channel.sent if sent[0] == "stream_error"]
    assert "vLLM refuses" in values["text"] and engine.aborted == ["a"]
    assert not server._waiting and not server._running
