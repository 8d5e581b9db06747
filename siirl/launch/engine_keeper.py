"""Keeps rollout engines between the attempts of a run: it starts them in the place of the workers. No torch.

An engine whose worker is gone forgets what that had asked, gives its device memory back and says that it is
idle (siirl/engines/rollout/served/server.py). A worker of the next attempt that wants an engine with the same
log, started with the same arguments and environment, gets it; in every other case, and in every doubt, it is
ended and a new one started.

consumes      calls of workers, by a socket that they inherit, and what the engines say (kept_engine.py)
produces      engines, which hold a socket to their worker; they end with this thread
waits for     nobody: it looks at all of them ten times a second; the rest of a message comes within seconds
"""

import contextlib
import os
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from siirl.config import Config
from siirl.deadline import Deadline
from siirl.engines.rollout.channel import Channel, ChannelClosed
from siirl.engines.rollout.served.engine_child import EngineChild
from siirl.engines.rollout.served.kept_engine import (
    CALL,
    KEEPER_FD,
    WORKER,
    End,
    Ended,
    EngineLease,
    EngineSpec,
    FromOwner,
    bound_waits,
    keeper_line,
    parts_of_idle,
)
from siirl.launch.health import Process, look_at

LOOK_S = 0.1
SETTLE_S = 10.0
"""How long the engines of dead workers may take until they are idle: a step of the engine, mostly."""
MESSAGE_S = 5.0
"""How long a worker may take to say the rest of what it has begun to say."""


@dataclass
class _Kept:
    """An engine, and to whom it belongs."""

    digest: str
    child: EngineChild
    line: socket.socket
    """To the engine."""
    owner: Channel | None = None
    """The conversation with its worker; None: that is gone."""
    idle_since_s: float | None = None
    parts: dict[int, Process | None] = field(default_factory=dict)
    """The processes that it had started when it became idle, as they were then."""

    def look(self) -> None:
        """Has it said that it is idle?"""
        if (parts := parts_of_idle(self.line)) is not None:
            self.parts = {pid: look_at(pid) for pid in parts}
            self.idle_since_s = time.monotonic()

    def why_unfit(self) -> str:
        """Why it can have no worker, as far as can be seen from outside; "" if it waits for one.

        The worker asks it further, in all its processes.
        """
        self.look()
        if self.child.poll() is not None:
            return "it has ended"
        if self.idle_since_s is None:
            return "it is at work"
        own = look_at(self.child.pid)
        for pid, before in {self.child.pid: own, **self.parts}.items():
            now = look_at(pid)
            if now is None or before is None or now.has_ended or now.started != before.started:
                return f"its process {pid} is gone"
            if now.is_stopped:
                return f"its process {pid} is stopped"
        return ""

    def take(self, connection: int) -> bool:
        """Give it the connection to its next worker; if it takes none, end it."""
        try:
            socket.send_fds(self.line, [WORKER], [connection])
        except OSError:
            self.end()
            return False
        self.idle_since_s = None
        self.parts = {}
        return True

    def end(self) -> None:
        self.line.close()
        self.child.end()
        if self.owner is not None:
            with contextlib.suppress(ChannelClosed):
                self.owner.send(Ended(self.child.poll() or 0))
            self.owner.close()


class EngineKeeper:
    """A thread that owns the engines of this machine, where the run may start again."""

    def __init__(self, cfg: Config) -> None:
        self._wait_s = cfg.trainer.deadline_s
        self._kept: dict[str, _Kept] = {}  # under the paths of their logs
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._calls, self._callers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._calls.setblocking(False)
        self._thread: threading.Thread | None = None
        if cfg.trainer.max_restarts:
            self._thread = threading.Thread(target=self._run, name="engine-keeper", daemon=True)
            self._thread.start()

    def descriptors(self) -> dict[str, int]:
        """Variable -> descriptor that workers inherit; none if they start engines themselves."""
        return {KEEPER_FD: self._callers_end.fileno()} if self._thread else {}

    def logs(self) -> set[Path]:
        """The logs of the engines that are there, which go on writing to them."""
        with self._lock:
            return {Path(name) for name in self._kept}

    def settle(self) -> None:
        """All workers are gone: wait until their engines are idle; end those that are not within SETTLE_S."""
        Deadline(SETTLE_S).until(
            lambda: all(one.idle_since_s is not None for one in self._there()), LOOK_S / 2
        )
        with self._lock:
            for name in [name for name, one in self._kept.items() if one.idle_since_s is None]:
                self._kept.pop(name).end()
                _say(name, f"it was not idle {SETTLE_S:g} s after its worker had gone")

    def close(self) -> None:
        """End all engines. Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for one in self._kept.values():
            one.end()
        self._kept.clear()
        self._calls.close()
        self._callers_end.close()

    def _there(self) -> list[_Kept]:
        with self._lock:
            return [*self._kept.values()]

    def _run(self) -> None:
        # Engines end with the thread that has started them (PR_SET_PDEATHSIG): this one.
        while not self._closed.is_set():
            self._wait()
            with self._lock:
                for name in [*self._kept]:
                    self._look(name)
                self._answer_calls()

    def _wait(self) -> None:
        """Until there may be something to read, for LOOK_S at most."""
        poll = select.poll()
        poll.register(self._calls, select.POLLIN)
        for one in self._there():
            if one.owner is not None:
                poll.register(one.owner.fileno(), select.POLLIN)
        poll.poll(LOOK_S * 1000)

    def _look(self, name: str) -> None:
        """What has become of an engine, and of its worker?"""
        one = self._kept[name]
        one.look()
        ended = one.child.poll() is not None
        if one.owner is not None and one.owner.ready(0.0):
            try:
                ended = isinstance(one.owner.receive(), End) or ended
            except ChannelClosed:
                one.owner.close()
                one.owner = None
        waits_s = 0.0 if one.idle_since_s is None else time.monotonic() - one.idle_since_s
        if ended or waits_s > self._wait_s:
            self._kept.pop(name).end()

    def _answer_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                _, descriptors, _, _ = socket.recv_fds(self._calls, len(CALL), 3)
                try:
                    if len(descriptors) == 3:
                        self._answer(*descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)

    def _answer(self, talk: int, connection: int, log: int) -> None:
        sock = socket.socket(fileno=os.dup(talk))
        bound_waits(sock, MESSAGE_S)
        owner = Channel(sock, FromOwner)
        if not self._gives(owner, connection, log):
            owner.close()  # it starts an engine of its own, or is gone

    def _gives(self, owner: Channel, connection: int, log: int) -> bool:
        """Whether a worker gets the engine that it wants."""
        try:
            wanted = owner.receive()
            if not isinstance(wanted, EngineSpec):
                return False
            one = self._fitting(wanted)
            stayed = one is not None and one.take(connection)
            if one is None or not stayed:
                one = _started(wanted, connection, log)
            self._kept[wanted.log_path] = one
            owner.send(EngineLease(one.child.pid, stayed))
        except (OSError, ChannelClosed):
            return False
        one.owner = owner
        return True

    def _fitting(self, wanted: EngineSpec) -> _Kept | None:
        """The engine that waits for this worker; ends another one in its place."""
        one = self._kept.pop(wanted.log_path, None)
        if one is None:
            return None
        otherwise = "another one is to be started otherwise"
        why = one.why_unfit() if one.digest == wanted.digest else otherwise
        if not why:
            return one
        one.end()
        _say(wanted.log_path, why)
        return None


def _say(log_path: str, why: str) -> None:
    """Write to the log of an engine why it has been ended."""
    with contextlib.suppress(OSError), Path(log_path).open("a") as log:
        log.write(f"siirl: the engine has been ended: {why}.\n")


def _started(wanted: EngineSpec, connection: int, log: int) -> _Kept:
    """A new engine. OSError if none can be started."""
    ours, theirs = keeper_line()
    with theirs:
        child = EngineChild(wanted.environment, connection, log, theirs.fileno())
    return _Kept(wanted.digest, child, ours)
