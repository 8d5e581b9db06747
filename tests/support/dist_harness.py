"""Runs a function on several gloo processes: the one way in which tests start workers.

Importing torch takes seconds, so one process (the nursery) imports it once per test session and forks the
workers of each call from there: every worker is fresh, and starts in milliseconds. It forks the commands of
siirl that a test starts, too (forked_starts.py).
"""

import atexit
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked_starts
from forked_workers import KILL_AFTER_S


class WorkerFailure(RuntimeError):
    """A worker raised, died, or passed the deadline; the message holds each failing rank's traceback."""


def run_workers(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 60,
    backend: str | None = "gloo",
    starts: bool = False,
) -> list[Any]:
    """Call fn(rank, world_size, *args) in world_size processes of one process group; return their results.

    fn must be importable (a module-level function); args and results must be picklable. Each worker has one
    thread, the environment of the caller, and the default process group initialised. With NCCL in `backend`,
    rank r uses CUDA device r. backend None: no process group, but the environment of a process that torchrun
    has started. starts: workers start processes of siirl. WorkerFailure, with tracebacks, if a worker raises,
    dies or is late.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=deadline_s), wait_for_workers=False)
    call = pickle.dumps((fn, args))
    forks = b"vllm" in call and forked_starts.may_fork() and forked_starts.fits(os.environ)
    branch = "vllm" if forks else ""
    job = {
        "call": call,
        "world_size": world_size,
        "port": store.port,
        "deadline_s": deadline_s,
        "backend": backend,
        "environ": dict(os.environ),
        "path": list(sys.path),
        "cwd": os.getcwd(),
        "starts": forks or (starts and forked_starts.may_fork()),
    }
    workers = _session.jobs(branch)
    try:
        workers.send(job)
        if not workers.poll(deadline_s + 2 * KILL_AFTER_S + 60):
            raise WorkerFailure(
                f"{fn.__name__}: no answer within {deadline_s} s and the time to kill its workers"
            )
        kind, result = workers.recv()
    except BaseException:
        _session.forget(branch)
        raise
    if kind == "failed":
        raise WorkerFailure(f"{fn.__name__} on {world_size} workers failed.\n{result}")
    return [pickle.loads(of_rank) for of_rank in result]


def run_interpreted(module: str) -> None:
    """Call main() of a module of tests/support in a process where Triton interprets kernels, on a CPU."""
    run_workers(_interpreted, 1, module, deadline_s=200, backend=None)


def _interpreted(rank: int, world_size: int, module: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read as a kernel is defined, those of Triton itself among them
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]
    importlib.import_module(module).main()


class Session:
    """The nurseries of this process, each started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._orders: dict[str, socket.socket] = {}
        self._jobs: dict[str, Connection] = {}
        self._starts: dict[str, socket.socket] = {}

    def jobs(self, branch: str) -> Connection:
        """Where the workers of `run_workers` are asked for."""
        if branch not in self._jobs:
            self._jobs[branch] = Connection(self._serving("jobs", branch, socket.SOCK_STREAM).detach())
        return self._jobs[branch]

    def starts(self, words: Sequence[str]) -> socket.socket:
        """Where the process of a command line is asked for."""
        branch = forked_starts.needs(words)
        if branch not in self._starts:
            self._starts[branch] = self._serving("starts", branch)
        return self._starts[branch]

    def take_orders_to(self, nursery: socket.socket) -> None:
        """A process below this one is the first: of a worker of pytest, which is a fork itself."""
        self._orders[""] = nursery

    def forget(self, branch: str) -> None:
        """The next workers are asked of another process."""
        self._jobs.pop(branch).close()

    def close(self) -> None:
        for end in (*self._jobs.values(), *self._starts.values(), *self._orders.values()):
            end.close()
        if self._process is not None:
            try:
                self._process.wait(KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _serving(self, service: str, branch: str, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
        if branch and branch not in self._orders:
            self._orders[branch] = self._serving_by("", "orders", branch, socket.SOCK_SEQPACKET)
        return self._serving_by(branch, service, "", kind)

    def _serving_by(self, nursery: str, service: str, branch: str, kind: int) -> socket.socket:
        if not self._orders:
            self._begin()
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with theirs:
            forked_starts.order(self._orders[nursery], service, branch, theirs.fileno())
        return ours

    def _begin(self) -> None:
        """Start the first one. The padding is where its forks show their command lines and variables."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        padding, base = "." * forked_starts.PADDING, dict(forked_starts.base or os.environ)
        own = {"SPT_NOENV": "1", "SIIRL_TEST_BASE": json.dumps(base), "PADDING": padding}
        with theirs:
            self._process = forked_starts.REAL(
                [sys.executable, str(Path(__file__).with_name("nursery.py")), str(theirs.fileno()), padding],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=base | own,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
            )
        self._orders[""] = ours


_session = Session()
atexit.register(_session.close)


def start_by_forks() -> None:
    """Have the commands of siirl that this process starts be forks."""
    owner = os.getpid()

    if (below := forked_starts.asks.below.pop(owner, None)) is not None:
        _session.take_orders_to(below)

    def channel(words: Sequence[str]) -> socket.socket | None:
        return _session.starts(words) if os.getpid() == owner else None

    def lost(words: Sequence[str]) -> None:
        if os.getpid() == owner and (gone := _session._starts.pop(forked_starts.needs(words), None)):
            gone.close()

    forked_starts.asks.channel = channel  # type: ignore[method-assign]
    forked_starts.asks.lost = lost  # type: ignore[method-assign]
    forked_starts.install(os.environ)
