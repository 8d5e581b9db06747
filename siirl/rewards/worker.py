"""A reward worker: a process, started by WorkerPool, that scores one sample after another.

Its pipe carries JSON: first the setup {"kwargs": {reward: {...}}, "custom": {path, name, reward_kwargs} or
null, "batch": whether that function takes many samples at once}, which it answers by {"ready": true} or
{"fatal": message}; then lists of samples, each sample answered by an outcome, at once or after the whole
list.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from siirl.rewards import choose
from siirl.rewards.registry import REWARDS, ScoreFn
from siirl.rewards.sample import Outcome, Sample, describe, failed, score_batch, score_sample
from siirl.rewards.user_function import load_user_function


def main() -> None:
    """Serve the pipe whose descriptor is argv[1], until it closes or the parent, argv[2], is gone."""
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole terminal group; the parent ends us
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        setup = json.loads(pipe.recv_bytes())
        functions = _load(setup)
    except Exception as error:
        pipe.send_bytes(json.dumps({"fatal": describe(error)}).encode())
        return
    pipe.send_bytes(json.dumps({"ready": True}).encode())
    while True:
        try:
            samples = [Sample(**given) for given in json.loads(pipe.recv_bytes())]
        except EOFError:
            return
        outcomes = _score_batch(functions, samples) if setup["batch"] else _score_each(functions, samples)
        for outcome in outcomes:
            pipe.send_bytes(json.dumps(outcome.__dict__).encode())


def _load(setup: dict[str, Any]) -> dict[str, ScoreFn]:
    functions: dict[str, ScoreFn] = {
        name: functools.partial(REWARDS[name].fn, **kwargs) for name, kwargs in setup["kwargs"].items()
    }
    if custom := setup["custom"]:
        function = load_user_function(**custom, batch=setup["batch"])
        functions[choose.CUSTOM] = functools.partial(function, **custom["reward_kwargs"])
    return functions


def _score_each(functions: dict[str, ScoreFn], samples: list[Sample]) -> Iterator[Outcome]:
    for sample in samples:
        try:
            yield score_sample(functions, sample)
        except (Exception, SystemExit) as error:
            yield failed(error)


def _score_batch(functions: dict[str, ScoreFn], samples: list[Sample]) -> list[Outcome]:
    try:
        return score_batch(functions[choose.CUSTOM], samples)
    except (Exception, SystemExit) as error:
        return [failed(error)] * len(samples)


def _end_with(parent: int) -> None:
    """Leave when the parent is gone, even in the middle of a sample that hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
