"""A reward worker: a process, started by WorkerPool, that scores one sample after another.

Its pipe carries JSON: first the setup {"kwargs": {reward: {...}}, "custom": {path, name, reward_kwargs} or
null, "batch": whether that function takes many samples at once, "imports": modules that take seconds},
which it answers by {"ready": true} or {"fatal": message}; then lists of samples, each sample answered by
{"outcome": {...}, "last": whether the worker ends now}, at once or after the whole list.
"""

import functools
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from siirl.rewards import by_data_source
from siirl.rewards.cpu_limit import was_interrupted
from siirl.rewards.reward_registry import REWARDS, ScoreFn
from siirl.rewards.sample import Outcome, Sample, describe, failed, score_batch, score_sample
from siirl.rewards.user_function import load_user_function
from siirl.sandbox.keeper import keep


def main() -> None:
    """Serve the pipe whose descriptor is argv[1], until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the pool ends us
    os.set_inheritable(int(sys.argv[1]), False)
    keep(int(sys.argv[1]))
    pipe = Connection(int(sys.argv[1]))
    try:
        setup = json.loads(pipe.recv_bytes())
        functions = _load(setup)
    except BaseException as error:  # noqa: BLE001 - the edge of the process, and to user code
        pipe.send_bytes(json.dumps({"fatal": describe(error)}).encode())
        return
    pipe.send_bytes(json.dumps({"ready": True}).encode())
    while True:
        try:
            samples = [Sample(**given) for given in json.loads(pipe.recv_bytes())]
        except (EOFError, ConnectionResetError):  # the pool has closed, or died with answers unread
            return
        outcomes = _score_batch(functions, samples) if setup["batch"] else _score_each(functions, samples)
        for outcome in outcomes:
            last = was_interrupted()
            pipe.send_bytes(json.dumps({"outcome": outcome.__dict__, "last": last}).encode())
            if last:
                return


def _load(setup: dict[str, Any]) -> dict[str, ScoreFn]:
    for module in setup.get("imports", ()):
        importlib.import_module(module)
    functions: dict[str, ScoreFn] = {
        name: functools.partial(REWARDS[name].fn, **kwargs) for name, kwargs in setup["kwargs"].items()
    }
    if custom := setup["custom"]:
        function = load_user_function(**custom, batch=setup["batch"])
        functions[by_data_source.CUSTOM] = functools.partial(function, **custom["reward_kwargs"])
    return functions


def _score_each(functions: dict[str, ScoreFn], samples: list[Sample]) -> Iterator[Outcome]:
    for sample in samples:
        try:
            outcome = score_sample(functions, sample)
        except BaseException as error:  # noqa: BLE001 - the edge to user code
            outcome = failed(error)
        yield outcome


def _score_batch(functions: dict[str, ScoreFn], samples: list[Sample]) -> list[Outcome]:
    try:
        return score_batch(functions[by_data_source.CUSTOM], samples)
    except BaseException as error:  # noqa: BLE001 - the edge to user code
        return [failed(error)] * len(samples)


if __name__ == "__main__":
    main()
