"""An engine process of this worker: started, asked, watched, ended. Imports no engine."""

import contextlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siirl.deadline import Deadline
from siirl.engines.rollout.channel import Channel, ChannelClosed, Message
from siirl.engines.rollout.served.engine_parts import EngineParts
from siirl.engines.rollout.served.messages import (
    Alive,
    Beat,
    Call,
    Done,
    Failed,
    Finished,
    FromEngine,
    Paused,
    Scored,
    Start,
    Stop,
    Submit,
)
from siirl.engines.rollout.served.temporary import TemporaryFolder
from siirl.errors import ConfigError, RolloutError
from siirl.observe.heartbeat import FD_VARIABLE as HEARTBEAT
from siirl.observe.logs import last_lines

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    HEARTBEAT,
)
"""Environment of our torch.distributed, which the engine's must not see, what Megatron wants of CUDA, and a
descriptor of this worker."""
SERVER = "siirl.engines.rollout.served.server"
POLL_S = 0.5
STOP_GRACE_S = 3.0
SILENCE_S = 20.0
"""A process that says nothing for so long while this worker waits for it is lost: it beats every second."""


class EngineLost(RolloutError):
    """The process has died, or does nothing any more, or one that it started.

    cause: in a sentence; tail: its last lines, or "".
    """

    def __init__(self, cause: str, tail: str) -> None:
        super().__init__(cause + tail)
        self.cause, self.tail = cause, tail


class EngineChild:
    """One that this process has started. It ends with the thread that did, however that ends."""

    def __init__(self, environment: Mapping[str, str], connection: int, log: int) -> None:
        """Start it. connection: its end of that to its worker; log: where it writes what it prints.

        OSError if it cannot be started.
        """
        self._temporary = TemporaryFolder()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(connection)],
                env={**environment, **self._temporary.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[connection],
            )
        except OSError:
            self._temporary.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, once it has ended; minus the number of the signal that ended it."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The same, after so many seconds at most."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End it and all that it has started, at once. Idempotent."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()
        self._temporary.close()


class EngineProcess:
    """One process that runs an engine. Every wait for it has a deadline; its death is named at once."""

    def __init__(self, name: str, env: dict[str, str], log_path: Path, deadline_s: float) -> None:
        """Start it. env: on top of this worker's environment. Its output goes to log_path."""
        self._what = f"rollout engine {name!r}"
        self.deadline_s = deadline_s
        self.silence_s = SILENCE_S
        self.writes_in_place = False
        """Whether its engine knows where loaders put weights, see WeightsInPlace."""
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        with log_path.open("ab") as log, theirs:
            self._log_offset = log.tell()
            self._process = EngineChild(clean | env, theirs.fileno(), log.fileno())
        self._parts = EngineParts(self.pid, log_path, self._log_offset)
        # A process that is stopped within a message, or reads none, stops nobody.
        patience = struct.pack("ll", int(SILENCE_S), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, patience)
        self._channel = Channel(ours, FromEngine)
        self._heard_s, self._waited_s = time.monotonic(), 0.0
        self._unread: list[Finished] = []
        self._owed: list[Message] = []  # messages whose answers nobody has waited for yet

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: Message) -> Any:
        """Send a message and wait for its answer. What streams have finished before is kept for `listen`.

        EngineLost: the process died, fell silent, or its engine said nothing for the deadline. RolloutError:
        it reported an error; ConfigError: it reported that the configuration cannot work.
        """
        self.settle()
        self.send(message)
        return self._answer(message)

    def post(self, message: Message) -> None:
        """Send a message for whose answer `settle` waits, or who asks or listens next. Errors of send."""
        self.send(message)
        self._owed.append(message)

    def settle(self, but_last: int = 0) -> None:
        """Wait for the answers to what was posted, but to so many at the end. Errors as of ask, the first."""
        until = len(self._owed) - but_last
        owed, self._owed = self._owed[:until], self._owed[until:]
        failures: list[RolloutError | ConfigError] = []
        for message in owed:
            try:
                self._answer(message)
            except EngineLost:
                raise
            except (RolloutError, ConfigError) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _answer(self, message: Message) -> Any:
        self.expect()
        progress, silence_s = "", math.inf if isinstance(message, Start) else self.silence_s
        while True:
            match self._receive(message.kind, POLL_S, progress, silence_s):
                case Alive(said):
                    progress = f" ({said})"
                case Failed(of_stream=False) as failed:
                    raise self._reported(message.kind, failed)
                case None if isinstance(message, Start):
                    self._parts.find()
                case Finished() as finished:
                    self._unread.append(finished)
                case Done() | Scored() | Paused() as answer:
                    return answer

    def call(self, method: str, **arguments: Any) -> Any:
        """What a method of the engine, NativeEngine, returns. Errors as of ask."""
        return self.ask(Call(method, arguments)).result

    def send(self, message: Message) -> None:
        """Send a message that has no answer of its own. EngineLost: the process died, or takes none."""
        try:
            self._channel.send(message.packed() if isinstance(message, Submit) else message)
        except ChannelClosed:
            raise self._death(message.kind) from None

    def listen(self, timeout_s: float) -> list[Finished]:
        """What a stream has finished: what is there, or the first within timeout_s seconds.

        Only while something is pending. Errors as those of ask; the deadline counts from the last message, or
        from `expect`.
        """
        self.settle()
        found, self._unread = self._unread, []
        wait = Deadline(timeout_s)
        while True:
            left_s = 0.0 if found else min(POLL_S, wait.left_s)
            try:
                message = self._receive("stream", left_s, "", self.silence_s)
            except EngineLost:
                if found:  # the next call will tell
                    return found
                raise
            match message:
                case None if found or wait.over:
                    return found
                case Failed(of_stream=True) as failed:
                    raise self._reported("stream", failed)
                case Finished() as finished:
                    found.append(finished)

    def forget(self) -> list[Finished]:
        """Drop what streams have finished and nobody has listened to; returns it."""
        unread, self._unread = self._unread, []
        return unread

    def expect(self) -> None:
        """Let the deadline of `listen` begin now: the process was idle, and has work from here on."""
        self._heard_s, self._waited_s = time.monotonic(), 0.0

    def _receive(self, kind: str, timeout_s: float, progress: str, silence_s: float) -> FromEngine | None:
        """The next message, or None after timeout_s. EngineLost if the process died, is silent, or hangs.

        What counts as silence is the time of waiting: a worker that was elsewhere, or was stopped itself, has
        not heard what it did not listen to.
        """
        began_s = time.monotonic()
        if not self._channel.ready(timeout_s):
            if self._process.poll() is not None and not self._channel.ready(0):
                raise self._death(kind)
            if trouble := self._parts.trouble():
                raise self._loss(kind, trouble)
            self._waited_s += min(time.monotonic() - began_s, POLL_S)
            who = f"{self._what} (pid {self.pid})"
            if self._waited_s > silence_s:
                cause = f"{who} is silent: no heartbeat in {silence_s:g} s of waiting for {kind!r}{progress}."
                raise EngineLost(cause, self._tail())
            if time.monotonic() - self._heard_s > self.deadline_s:
                raise EngineLost(
                    f"{who} hangs: no word in {self.deadline_s:g} s while this worker waits for "
                    f"{kind!r}{progress}. Raise trainer.deadline_s if that is too short for this model.",
                    self._tail(),
                )
            return None
        try:
            message = self._channel.receive()
        except ChannelClosed:
            raise self._death(kind) from None
        self._waited_s = 0.0
        if not isinstance(message, Beat):  # the process lives; whether its engine does is what others say
            self._heard_s = time.monotonic()
        return message

    def _reported(self, kind: str, failed: Failed) -> RolloutError | ConfigError:
        """What it says, or of which loss it is the echo."""
        if lost := self._parts.lost():
            return self._loss(kind, lost)
        if failed.user_error:
            return ConfigError(failed.text)
        return RolloutError(f"{self._what}, {kind}: {failed.text}{self._tail()}")

    def close(self) -> None:
        """End the process. Idempotent."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send(Stop())
        self._channel.close()
        self._process.wait(STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        self._channel.close()
        self._process.end()

    def _loss(self, kind: str, trouble: str) -> EngineLost:
        cause = f"{self._what} (pid {self.pid}) cannot go on with {kind!r}, as {trouble}."
        return EngineLost(cause, self._tail())

    def _death(self, kind: str) -> EngineLost:
        code = self._process.wait(STOP_GRACE_S)
        how = f"exit code {code}"
        if code is None:
            how = "it closed its connection, or stands still within a message"
        elif code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        hint = " Often that is the out-of-memory killer." if code == -signal.SIGKILL else ""
        cause = f"{self._what} (pid {self.pid}) died during {kind!r}: {how}.{hint}"
        return EngineLost(cause, self._tail())

    def _tail(self) -> str:
        """The last lines that the process wrote."""
        lines = last_lines(self._log_path, self._log_offset)
        where = f"last lines of {self._log_path}:"
        return "".join(f"\n  | {line}" for line in [where, *lines]) if lines else ""
