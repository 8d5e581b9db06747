"""A reward worker: a process, started by WorkerPool, that scores one sample after another.

Its pipe carries JSON: first the setup {"kwargs": {reward: {...}}, "custom": {path, name, reward_kwargs} or
null}, which it answers by {"ready": true} or {"fatal": message}; then lists of samples, each sample
answered by an outcome at once.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from siirl.errors import DataError
from siirl.rewards import choose
from siirl.rewards.registry import REWARDS, ScoreFn
from siirl.rewards.sample import Outcome, Sample, score_sample
from siirl.rewards.user_function import load_user_function


def main() -> None:
    """Serve the pipe whose descriptor is argv[1], until it closes or the parent, argv[2], is gone."""
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole terminal group; the parent ends us
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        functions = _load(json.loads(pipe.recv_bytes()))
    except Exception as error:
        pipe.send_bytes(json.dumps({"fatal": describe(error)}).encode())
        return
    pipe.send_bytes(json.dumps({"ready": True}).encode())
    while True:
        try:
            samples = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        for sample in samples:
            outcome = _score(functions, Sample(**sample))
            pipe.send_bytes(json.dumps(outcome.__dict__).encode())


def describe(error: BaseException) -> str:
    """The exception in one line: type, message, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _load(setup: dict[str, Any]) -> dict[str, ScoreFn]:
    functions: dict[str, ScoreFn] = {
        name: functools.partial(REWARDS[name].fn, **kwargs) for name, kwargs in setup["kwargs"].items()
    }
    if custom := setup["custom"]:
        function = load_user_function(**custom)
        functions[choose.CUSTOM] = functools.partial(function, **custom["reward_kwargs"])
    return functions


def _score(functions: dict[str, ScoreFn], sample: Sample) -> Outcome:
    try:
        return score_sample(functions, sample)
    except DataError as error:
        return Outcome(error=str(error), failure="data")
    except (Exception, SystemExit) as error:
        return Outcome(error=describe(error), failure="raised")


def _end_with(parent: int) -> None:
    """Leave when the parent is gone, even in the middle of a sample that hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
