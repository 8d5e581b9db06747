"""A vLLM engine that stays when its workers go, as the next ones find it: on a CPU and on a GPU."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil
from served_engines import build, load, submitted, two_sets

from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.engines.rollout.served.engine_parts import find_parts
from siirl.launch.engine_keeper import EngineKeeper
from siirl.parallel.process_groups import ProcessGroupManager

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [3 * i % 20 + 2 for i in range(70)]]
"""The last fills blocks of the prefix cache."""
SHORT = SamplingParams(max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=180, ignore_eos=True)


def check_an_engine_that_stays(
    model_dir,
    device,
    monkeypatch,
    *keys: str,
    between: Callable = lambda: None,
    groups: ProcessGroupManager | None = None,
):
    """Its worker goes while requests run; the next one gets it, without a trace of the first.

    between: called when it waits. groups: of several workers that share it, all of which call this and go.
    """
    keeper = EngineKeeper(load_config([]))
    for name, descriptor in keeper.descriptors().items():
        monkeypatch.setenv(name, str(descriptor))
    first, second = two_sets(model_dir)
    with contextlib.closing(keeper):
        fresh = build(model_dir, *keys, device=device, groups=groups)
        load(fresh, second, 4)
        expected, seen = fresh.generate(PROMPTS, SHORT, range(4)), []
        load(fresh, first, 4)
        others = fresh.generate(PROMPTS, SHORT, range(4))
        assert others != expected, "the weights tell"
        engine = fresh
        for _ in range(2):
            seen.append(processes(engine))
            go(engine)
            keeper.settle()
            assert not [pid for pid in seen[0] if "siirl-weights" in Path(f"/proc/{pid}/maps").read_text()]
            between()
            engine = build(model_dir, *keys, device=device, groups=groups)
            assert engine.weight_version == -1
            load(engine, second, 4)
            assert engine.generate(PROMPTS, SHORT, range(4)) == expected
            assert processes(engine) == seen[0], "its own, and those that vLLM has started"
            load(engine, first, 5)
            assert [[one.token_ids for one in row] for row in engine.generate(PROMPTS, SHORT, range(4))] == [
                [one.token_ids for one in row] for row in others
            ]
        engine.close()


def processes(engine) -> dict[int, float]:
    """Their numbers, and when they were started, as the worker that has the engine sees them."""
    if engine._process is None:
        return {}
    found = [psutil.Process(engine._process.pid), *find_parts(engine._process.pid)]
    assert len(found) == (1 if len(engine._shard.ranks) == 1 else 2 + len(engine._shard.ranks))
    return {process.pid: process.create_time() for process in found}


def go(engine):
    """Be gone, amid requests, as a worker that was killed: the engine hears of it by its connection."""
    if engine._process is None:
        return
    submitted(engine, LONG, PROMPTS).collect(0.2)
    process = engine._process._process
    process._channel.close()
    process._process.leave()
