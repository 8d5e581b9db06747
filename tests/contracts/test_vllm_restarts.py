"""A vLLM engine on the CPU whose process is killed or stopped comes back as it was, and answers the same."""

import logging
import os
import random
import signal
import time

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from served_engines import PROMPTS, build, check_it_comes_back, load, streamed, submitted, two_sets
from updated_engines import IN_PLACE, loaders_of

from siirl.data.completions import SamplingParams
from siirl.engines.rollout.served import engine_process
from siirl.engines.rollout.served.engine_process import EngineProcess
from siirl.engines.weights import in_place

SAMPLED, GREEDY = SamplingParams(max_tokens=120), SamplingParams(max_tokens=60, temperature=0)
NAMES = ("model.embed_tokens.weight", "model.layers.1.self_attn.qkv_proj.weight", "model.norm.weight")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model_dir(path, vocab=24, init_std=0.3, head_dim=32, max_positions=256, tokenizer=False)


@pytest.fixture(scope="module")
def weights(model_dir):
    return two_sets(model_dir)


def parameters(engine):
    return [part for name in NAMES for part in engine.read_tensor(name)]


def check_equal(found, undisturbed):
    assert found == undisturbed


@pytest.mark.timeout(300)
def test_an_engine_that_is_killed_while_it_streams_comes_back_as_it_was(model_dir, weights, caplog):
    """Greedy and seeded, bit for bit; beyond the bound the run ends."""
    caplog.set_level(logging.WARNING)
    engine = build(model_dir, "actor_rollout_ref.rollout.max_engine_restarts=1")

    def held():
        return [part.tolist() for part in parameters(engine)], engine.generate(PROMPTS, GREEDY, range(4))

    try:
        load(engine, weights[1], 4)
        check_it_comes_back(engine, SAMPLED, [lambda: engine._process.pid], check_equal, held, caplog)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def lasting(model_dir, weights):
    """An engine that may be lost often, and what it answers under each of the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "SILENCE_S", 8.0)
        patch.setattr(in_place, "BUCKET_BYTES", 9000)  # several pieces
        engine = build(
            model_dir,
            "actor_rollout_ref.rollout.max_engine_restarts=100",
            "actor_rollout_ref.rollout.replace_weights=in_place",
        )
        expected = []
        for version, one in enumerate(weights):
            load(engine, one, version)
            expected.append((streamed(engine, SAMPLED), engine.generate(PROMPTS, GREEDY, range(4))))
        assert expected[0] != expected[1]
        yield engine, expected, parameters(engine)
        engine.close()


BY_LOADERS = ("begin_update", "update", "finish_update")
PHASES = (*BY_LOADERS, *IN_PLACE, "submit", "pause", "read_tensor")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("phase", PHASES)
def test_in_whatever_phase_an_engine_is_lost_it_comes_back_as_it_was(phase, lasting, weights, monkeypatch):
    """Killed or stopped, before it gets the message of a phase or while it works on it."""
    engine, expected, held = lasting
    rng = random.Random()
    end, late = rng.choice([signal.SIGKILL, signal.SIGSTOP]), rng.random() < 0.5
    case, send, armed = (phase, end.name, late), EngineProcess.send, []

    def send_and_lose(process, message):
        loses = armed and message.kind == phase
        if loses and not late:
            os.kill(process.pid, armed.pop())
        send(process, message)
        if loses and late:
            time.sleep(rng.uniform(0, 0.05))
            os.kill(process.pid, armed.pop())

    monkeypatch.setattr(EngineProcess, "send", send_and_lose)
    if phase in BY_LOADERS:
        monkeypatch.setattr(engine, "_weights", loaders_of(engine))
    load(engine, weights[0], 0)
    armed.append(end)
    load(engine, weights[1], 1)
    assert engine.generate(PROMPTS, GREEDY, range(4)) == expected[1][1], case
    assert streamed(engine, SAMPLED) == expected[1][0], case
    stream = submitted(engine, SAMPLED)
    stopped = dict(stream.pause())
    assert stopped.keys() == {0, 1, 2, 3} and not stream.num_pending, case
    for key, part in stopped.items():
        assert expected[1][0][key].token_ids[: len(part.token_ids)] == part.token_ids, case
    found = parameters(engine)
    assert all(torch.equal(one, other) for one, other in zip(found, held, strict=True)), case
    assert not armed and engine.drain_restarts() == 1, case
