"""A vLLM engine that stays when its worker goes, as the next worker finds it: on a CPU and on a GPU."""

import contextlib
from collections.abc import Callable

from served_engines import build, load, submitted, two_sets

from siirl.config import load_config
from siirl.engines.rollout.base import SamplingParams
from siirl.launch.engine_keeper import EngineKeeper

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [3 * i % 20 + 2 for i in range(70)]]
"""The last fills blocks of the prefix cache."""
SHORT = SamplingParams(max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=180, ignore_eos=True)


def check_an_engine_that_stays(model_dir, device, monkeypatch, *keys: str, between: Callable = lambda: None):
    """Its worker goes while requests run; the next one gets it, without a trace of the first.

    between: called when it waits.
    """
    keeper = EngineKeeper(load_config([]))
    for name, descriptor in keeper.descriptors().items():
        monkeypatch.setenv(name, str(descriptor))
    first, second = two_sets(model_dir)
    with contextlib.closing(keeper):
        fresh = build(model_dir, *keys, device=device)
        load(fresh, second, 4)
        expected, pids = fresh.generate(PROMPTS, SHORT, range(4)), []
        load(fresh, first, 4)
        others = fresh.generate(PROMPTS, SHORT, range(4))
        assert others != expected, "the weights tell"
        engine = fresh
        for _ in range(2):
            pids.append(engine._process.pid)
            submitted(engine, LONG, PROMPTS).collect(0.2)
            go(engine)
            keeper.settle()
            between()
            engine = build(model_dir, *keys, device=device)
            assert engine.weight_version == -1
            load(engine, second, 4)
            assert engine.generate(PROMPTS, SHORT, range(4)) == expected
            assert engine._process.pid == pids[0]
            load(engine, first, 5)
            assert [[one.token_ids for one in row] for row in engine.generate(PROMPTS, SHORT, range(4))] == [
                [one.token_ids for one in row] for row in others
            ]
        engine.close()


def go(engine):
    """Be gone, as a worker that was killed: the engine hears of it by its connection."""
    process = engine._process._process
    process._channel.close()
    process._process.leave()
