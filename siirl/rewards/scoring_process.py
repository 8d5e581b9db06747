"""A reward worker: a process, started by WorkerPool, that scores one sample after another.

Frames carry JSON: first the setup {"kwargs": {reward: {...}}, "custom": {path, name, reward_kwargs, and
names, if there are several} or null, "batch": whether that function takes many samples at once,
"imports": modules that take seconds, "kept": the user's code as it was when the run began}, which it
answers by {"ready": true} or {"fatal": message}; then {"samples": [[number, sample], ...]}, each sample
answered by {"sample": number, "outcome": {...}, "last": whether the worker ends now, "leak": why, if it
holds too much}, at once or after the whole list. The socket is the keeper's: user code runs in a process
that has no descriptor of ours.
"""

import contextlib
import functools
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from siirl.rewards.cpu_limit import was_interrupted
from siirl.rewards.reward_registry import CUSTOM, REWARDS, ScoreFn, register_built_in
from siirl.rewards.sample import Outcome, Sample, describe, failed, score_batch, score_sample
from siirl.rewards.user_function import load_user_function
from siirl.sandbox import frames
from siirl.sandbox.keeper import keep
from siirl.sandbox.shared_frames import SharedFrames
from siirl.user_code.load_object import keep_to


@contextlib.contextmanager
def this_process_only() -> Iterator[None]:
    """Around a call of user code: a process that it forked does not go on behind the block.

    Such a child ends there as a program does at its end: with 0, with the code of its SystemExit, or with 1
    after the traceback of what it raised. Handlers of our process (atexit, finally) do not run in it.
    """
    caller = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != caller:
            _leave(error)
        raise
    if os.getpid() != caller:
        _leave(None)


def _leave(error: BaseException | None) -> None:
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if code and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


MOST_GROWTH_BYTES = 1 << 30


class Leak:
    """Whether this process holds ever more: memory, or files and sockets (descriptors)."""

    def __init__(self) -> None:
        self._first: tuple[int, int] | None = None
        self._most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def found(self) -> str | None:
        """In half a sentence, what has leaked since the first look, if the process must go for it.

        That is the memory of the first look once more and MOST_GROWTH_BYTES, as functions load things when
        they are first called; or half of the descriptors that a process may have.
        """
        memory, descriptors = _memory_bytes(), len(os.listdir("/proc/self/fd"))
        if self._first is None:
            self._first = memory, descriptors
        if memory > 2 * self._first[0] + MOST_GROWTH_BYTES:
            return f"it holds {memory >> 20} MiB, {self._first[0] >> 20} after its first samples"
        if descriptors > max(self._first[1], self._most_descriptors):
            return f"it holds {descriptors} files and sockets, {self._first[1]} after its first samples"
        return None


def _memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Serve the socket whose descriptor is argv[1], until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the pool ends us
    os.set_inheritable(int(sys.argv[1]), False)
    register_built_in()
    shared = SharedFrames()
    keep(int(sys.argv[1]), shared)
    setup = _next(shared)
    try:
        with this_process_only():
            functions = _load(setup)
    except BaseException as error:  # noqa: BLE001 - the edge of the process, and to user code
        shared.send(frames.packed({"fatal": describe(error)}))
        return
    shared.send(frames.packed({"ready": True}))
    leak = Leak()
    score = _score_batch if setup["batch"] else _score_each
    while True:
        given = _next(shared)["samples"]
        outcomes = score(functions, [Sample(**sample) for _, sample in given])
        for (number, _), outcome in zip(given, outcomes, strict=True):
            leaks = leak.found() if not setup["batch"] or number == given[-1][0] else None
            last = was_interrupted() or leaks is not None
            answer = {"sample": number, "outcome": outcome.__dict__, "last": last, "leak": leaks}
            shared.send(frames.packed(answer))
            if last:
                return


def _next(shared: SharedFrames) -> dict[str, Any]:
    frame = shared.receive()
    return frames.unpacked(frame[: frames.HEADER.size], frame[frames.HEADER.size :])


def _load(setup: dict[str, Any]) -> dict[str, ScoreFn]:
    keep_to(setup["kept"])
    for module in setup.get("imports", ()):
        importlib.import_module(module)
    functions: dict[str, ScoreFn] = {
        name: functools.partial(REWARDS[name].fn, **kwargs) for name, kwargs in setup["kwargs"].items()
    }
    if custom := setup["custom"]:
        for part, name in custom.get("names", {CUSTOM: custom["name"]}).items():
            kwargs = custom["reward_kwargs"]
            function = load_user_function(custom["path"], name, kwargs, batch=setup["batch"])
            functions[part] = functools.partial(function, **kwargs)
    return functions


def _score_each(functions: dict[str, ScoreFn], samples: list[Sample]) -> Iterator[Outcome]:
    for sample in samples:
        try:
            with this_process_only():
                outcome = score_sample(functions, sample)
        except BaseException as error:  # noqa: BLE001 - the edge to user code
            outcome = failed(error)
        yield outcome


def _score_batch(functions: dict[str, ScoreFn], samples: list[Sample]) -> list[Outcome]:
    try:
        with this_process_only():
            return score_batch(functions[CUSTOM], samples)
    except BaseException as error:  # noqa: BLE001 - the edge to user code
        return [failed(error)] * len(samples)


if __name__ == "__main__":
    main()
