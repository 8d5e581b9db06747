"""Engines that outlive their worker: how a worker gets one from the keeper of its launcher. No torch.

The keeper (siirl/launch/engine_keeper.py) starts engines in the place of workers. A worker sends it three
descriptors, by a socket that it has inherited: its conversation with the keeper, the engine's end of their
connection, and the engine's log. Over the conversation it says which engine it wants, hears which it has got
and when that ends, and may have it ended. An engine whose worker is gone waits for the worker that wants the
same one.
"""

import contextlib
import hashlib
import os
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from siirl.engines.rollout.channel import Channel, ChannelClosed, Message

KEEPER_FD = "SIIRL_ENGINES_FD"
"""Variable with the number of the socket; without it, an engine is its worker's child."""
ANSWER_S = 10.0
"""How long a keeper may take to answer. One that is stopped is done without."""
CALL = b"engine"
"""What the descriptors come with."""
IDLE, WORKER = b"idle", b"worker"
"""What an engine and its keeper tell each other: it waits for a worker (with the numbers of the processes
that it has started and needs); here is one (with the connection)."""
MOST_IDLE_BYTES = 1 << 14


class EngineSpec(Message):
    """The first message of a worker. Answered by Given."""

    log_path: str
    """Of the engine: of each there is one in a run."""
    digest: str
    """Of all that it is started with."""
    environment: dict[str, str]


class EngineLease(Message):
    """The engine runs."""

    pid: int
    stayed: bool
    """It has had a worker before, and waited for this one."""


class End(Message):
    """End the engine at once. Answered by Ended."""


class Ended(Message):
    """The engine has ended."""

    code: int


FromOwner = EngineSpec | End
FromKeeper = EngineLease | Ended


class KeptEngine:
    """An engine that a keeper has started for this worker: what EngineChild is of one's own."""

    outlives = True

    def __init__(self, talk: Channel, given: EngineLease) -> None:
        self._talk, self.pid, self.stayed = talk, given.pid, given.stayed
        self._code: int | None = None
        self._left = False

    def poll(self) -> int | None:
        """See EngineChild."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        """See EngineChild."""
        if self._code is None and not self._left and self._talk.ready(timeout_s):
            try:
                self._code = self._talk.receive().code
            except ChannelClosed:  # the keeper has gone, and its engines with it
                self._code = -signal.SIGKILL
        return self._code

    def end(self) -> None:
        """See EngineChild. One that was let go of stays."""
        if not self._left and self.poll() is None:
            with contextlib.suppress(ChannelClosed):
                self._talk.send(End())
            if self.wait(ANSWER_S) is None:  # the keeper is stopped, so nobody else has taken over the number
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self._code = -signal.SIGKILL
        self._talk.close()

    def leave(self) -> None:
        """Let go of it: it may wait for another worker. Idempotent."""
        self._left = True
        self._talk.close()


def ask_keeper(
    log_path: Path, start: Message, environment: Mapping[str, str], connection: socket.socket, log: int
) -> KeptEngine | None:
    """An engine of the launcher's keeper, with the other end of a connection; None if there is no keeper.

    start: what the engine is told first. None also if the keeper does not answer, for whatever reason: the
    worker then starts one of its own.
    """
    keeper = os.environ.get(KEEPER_FD)
    if keeper is None:
        return None
    ours, theirs = socket.socketpair()
    bound_waits(ours, ANSWER_S)
    talk = Channel(ours, FromKeeper)
    try:
        wanted = EngineSpec(str(log_path), digest_of(start, environment), dict(environment))
        with theirs, socket.socket(fileno=os.dup(int(keeper))) as calls:
            if (calls.family, calls.type) != (socket.AF_UNIX, socket.SOCK_DGRAM):
                raise OSError("a variable of another launcher")
            bound_waits(calls, ANSWER_S)
            socket.send_fds(calls, [CALL], [theirs.fileno(), connection.fileno(), log])
        talk.send(wanted)
        answer = talk.receive()
    except (OSError, ChannelClosed, UnicodeEncodeError):  # the last: of a variable that is no text
        talk.close()
        return None
    if isinstance(answer, EngineLease):
        return KeptEngine(talk, answer)
    talk.close()
    return None


def digest_of(start: Message, environment: Mapping[str, str]) -> str:
    """Of what an engine is started with. Equal only for what is equal."""
    parts = [start, sorted(environment.items())]
    return hashlib.sha256(msgspec.msgpack.encode(parts, enc_hook=str)).hexdigest()


def bound_waits(sock: socket.socket, most_s: float) -> None:
    """Have no send and no receipt of a message, once begun, wait for a process that is stopped."""
    patience = struct.pack("ll", int(most_s), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, patience)


def keeper_line() -> tuple[socket.socket, socket.socket]:
    """Between a keeper and an engine: what one sends at once, the other receives at once."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def parts_of_idle(line: socket.socket) -> list[int] | None:
    """In a keeper: the processes that an engine needs, if it has said that it is idle; waits for nothing."""
    with contextlib.suppress(OSError, ValueError):
        word, *pids = line.recv(MOST_IDLE_BYTES, socket.MSG_DONTWAIT).split()
        if word == IDLE:
            return [int(pid) for pid in pids]
    return None


def next_worker(keeper: socket.socket, parts: Sequence[int]) -> socket.socket | None:
    """In an engine: say that it is idle, and wait for a worker; None if the keeper has gone.

    parts: the processes that it has started and needs.
    """
    with contextlib.suppress(OSError):
        keeper.send(b" ".join([IDLE, *(b"%d" % pid for pid in parts)]))
        _, descriptors, _, _ = socket.recv_fds(keeper, len(WORKER), 1)
        if descriptors:
            os.set_inheritable(descriptors[0], False)
            return socket.socket(fileno=descriptors[0])
    return None
