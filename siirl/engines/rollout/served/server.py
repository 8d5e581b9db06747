"""The process of an engine: driven by its worker's messages over a socket.

    python -m siirl.engines.rollout.served.server FD [KEEPER_FD]

FD: the inherited socket. What is said over it stands in messages.py. The process ends with its worker; with a
socket to a keeper, which has started it, it waits for another worker then, if its engine is fit for one
(server.py). The requests of a Submit join those that run, and those that a step has completed are told by a
Finished, whatever else the worker sends; what it does not read yet waits here, and the engine goes on. While
it generates, the process says Alive about every second, from the thread that runs the engine: an engine that
hangs falls silent.
"""

import argparse
import contextlib
import ctypes
import importlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from siirl.deadline import Deadline
from siirl.engines.rollout.channel import Channel, ChannelClosed, Message
from siirl.engines.rollout.served.engine_parts import find_parts
from siirl.engines.rollout.served.kept_engine import next_worker
from siirl.engines.rollout.served.messages import (
    Abort,
    Alive,
    Answer,
    Beat,
    Call,
    Done,
    Doubt,
    Failed,
    Finished,
    FromEngine,
    FromWorker,
    Pause,
    Paused,
    RowScores,
    Score,
    Scored,
    Start,
    Stop,
    Submit,
)
from siirl.engines.rollout.served.temporary import names_noted
from siirl.errors import RolloutError, UserError
from siirl.observe.printable import printable

BEAT_EVERY_S = 1.0


class BeatingChannel(Channel):
    """The engine's end of its connection: several threads may send, one of which sends a Beat a second.

    A beat waits for nobody: while another message is being sent, or the worker has not read enough of what
    was sent before, it is left out. So a worker that does not listen finds some beats later, never too many.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        super().__init__(sock, receives)
        self._sending = threading.Lock()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, message: Message) -> None:
        """See Channel."""
        with self._sending:
            super().send(message)

    def _beat(self) -> None:
        room = select.poll()
        room.register(self.fileno(), select.POLLOUT)
        while True:
            time.sleep(BEAT_EVERY_S)
            if not self._sending.acquire(blocking=False):
                continue
            try:
                if room.poll(0):
                    super().send(Beat())
            except ChannelClosed:
                return
            finally:
                self._sending.release()


ALL = frozenset({"weights", "kv_cache"})
"""The parts that sleep."""
BEGINS, FINISHES = "begin_", "finish_"
"""How methods of NativeEngine are named between which weights are replaced, in whatever way."""


class Renewal:
    """What a worker has had its engine do, as far as the next worker depends on it."""

    def __init__(self) -> None:
        self.sound = True
        """It has had no error of its own."""
        self._updating = False
        self._without_weights = False
        """None have come since it changed its worker."""
        self._sleeping: frozenset[str] = frozenset()
        self._sleep: dict[str, Any] | None = None
        """How it was told to sleep last."""
        self._rests = False
        """It sleeps since it changed its worker, who does not know."""

    def begins(self, method: str) -> bool:
        """It is told to do this; False if that is done already."""
        if method.startswith(BEGINS):
            self._updating = True
        if method == "sleep" and self._rests:
            self._rests = False
            return False
        return True

    def done(self, method: str, arguments: Mapping[str, Any]) -> None:
        """It has done this."""
        match method:
            case _ if method.startswith(FINISHES):
                self._updating = self._without_weights = False
            case "sleep":
                self._sleep, self._sleeping = dict(arguments), ALL
            case "wake":
                self._sleeping -= {arguments["part"]}

    def check_weights(self) -> None:
        """RolloutError if what it has are weights of a worker before."""
        if self._without_weights:
            raise RolloutError("it has no weights of this worker: a sync comes first")

    def renew(self, engine: Any) -> bool:
        """Make an engine (NativeEngine, or None before it was started) fit; whether it is."""
        partly = bool(self._sleeping) and self._sleeping != ALL
        if engine is None or not hasattr(engine, "renew") or not self.sound or self._updating or partly:
            return False
        engine.renew()
        if self._sleep is not None and not self._sleeping:
            engine.sleep(**self._sleep)
            self._sleeping = ALL
        self._without_weights, self._rests = True, bool(self._sleeping)
        return True


ALIVE_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1


class Server:
    """Answers the messages of its worker, and of those that come after it, with one engine."""

    def __init__(self, channel: Channel) -> None:
        self._engine: Any = None
        self._running: set[str] = set()  # requests of the stream
        self._speaks = Deadline(ALIVE_EVERY_S)
        self._renewal = Renewal()
        self.connect(channel)

    def connect(self, channel: Channel) -> None:
        """From now on, `run` answers the messages of this channel."""
        self._channel = channel
        self._alone = threading.Event()  # the worker has gone
        self._inbox: queue.Queue[FromWorker | None] = queue.Queue()
        self._outbox: queue.Queue[FromEngine | None] = queue.Queue()

    def run(self) -> bool:
        """Until the worker closes the channel or says Stop; whether it did not say so."""
        # Threads of their own: the worker can always send, and the engine go on, while neither is read.
        ways = (self._channel, self._inbox, self._alone), (self._channel, self._outbox)
        for work, way in zip((_read, _write), ways, strict=True):
            threading.Thread(target=work, args=way, daemon=True).start()
        while True:
            while self._running and self._inbox.empty():
                self._guarded(True, self._advance)
            match self._inbox.get():
                case None:
                    return True
                case Stop():
                    return False
                case Submit() as submitted:
                    self._guarded(True, self._submit, submitted)
                case message:
                    self._guarded(False, self._answer, message)

    def renew(self) -> bool:
        """Make the engine fit for another worker; whether it is."""
        self._outbox.put(None)
        self._channel.close()
        self._running.clear()
        why_not = "it was not whole when its worker went, within a weight sync or after an error"
        try:
            if self._renewal.renew(self._engine):
                return True
        except Exception as error:  # noqa: BLE001 - the edge of the process: another one is started
            why_not = repr(error)
        print(f"siirl: the engine is not fit for another worker: {why_not}.", file=sys.stderr, flush=True)
        return False

    def _answer(self, message: FromWorker) -> None:
        answer: Done | Scored | Paused = Done()
        match message:
            case Start(native, arguments):
                with names_noted():
                    self._engine = importlib.import_module(native).NativeEngine(arguments)
            case Call(method, arguments):
                if self._renewal.begins(method):
                    answer = Done(getattr(self._engine, method)(**arguments))
                    self._renewal.done(method, arguments)
            case Score():
                answer = self._score(message)
            case Pause(names):
                answer = Paused(self._pause(names or []))
            case Abort():
                self._abort()
            case Doubt():
                self._renewal.sound = False
        if not isinstance(message, Call) or self._outbox.unfinished_tasks:
            self._outbox.put(answer)
        else:  # the worker reads it now: no other thread need come to run, which is time of each weight sync
            self._channel.send(answer)
        if isinstance(message, Call) and hasattr(self._engine, "rest"):
            self._guarded(True, self._engine.rest)  # of a failure hears who asks it to sample

    def _guarded(self, of_stream: bool, work: Callable[..., None], *arguments: Any) -> None:
        """Do it; an error goes to the worker, which ends the run or goes on. of_stream: of its requests."""
        try:
            work(*arguments)
        except ChannelClosed:  # nobody is there to be told; `run` ends
            return
        except Exception as error:  # noqa: BLE001 - the edge of the process: the worker is told
            if of_stream:
                self._abort()
            known = isinstance(error, UserError)
            self._renewal.sound = self._renewal.sound and known
            text = str(error) if known else f"{type(error).__name__}: {error}"
            self._outbox.put(Failed(printable(text), known, of_stream))

    def _submit(self, submitted: Submit) -> None:
        self._renewal.check_weights()
        for request in submitted.unpacked():
            self._engine.add(request, submitted.adapter)
            self._running.add(str(request.key))

    def _advance(self) -> None:
        """One step of the engine for the stream's requests."""
        answers = self._engine.step()
        self._running.difference_update(answer.key for answer in answers)
        if answers:
            self._outbox.put(Finished(answers, {} if self._running else self._engine.stats()))
        self._say_alive(f"{len(self._running)} requests are running")

    def _pause(self, names: list[str]) -> list[Answer]:
        stopped = self._engine.stop([name for name in names if name in self._running])
        self._running.difference_update(answer.key for answer in stopped)
        return stopped

    def _abort(self) -> None:
        if self._running:
            self._engine.abort(sorted(self._running))
        self._running.clear()

    def _score(self, asked: Score) -> Scored:
        self._renewal.check_weights()
        for number, tokens in enumerate(asked.rows):
            self._engine.add_scored(number, tokens, asked.top_k)
        scores: dict[int, RowScores] = {}
        while len(scores) < len(asked.rows):
            scores |= self._engine.step_scored(asked.starts)
            self._say_alive(f"{len(scores)} of {len(asked.rows)} rows are read")
        return Scored([scores[number] for number in range(len(asked.rows))])

    def _say_alive(self, progress: str) -> None:
        """To the worker. ChannelClosed if it has gone, so that the work for it ends."""
        if self._alone.is_set():
            raise ChannelClosed("the worker has gone")
        if self._speaks.due():
            self._outbox.put(Alive(progress))


def _read(channel: Channel, inbox: queue.Queue[FromWorker | None], alone: threading.Event) -> None:
    with contextlib.suppress(ChannelClosed):
        while True:
            inbox.put(channel.receive())
    alone.set()
    inbox.put(None)


def _write(channel: Channel, outbox: queue.Queue[FromEngine | None]) -> None:
    with contextlib.suppress(ChannelClosed):
        while (message := outbox.get()) is not None:
            channel.send(message)
            outbox.task_done()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="an engine of a siirl run; started by a worker")
    parser.add_argument("fd", type=int)
    parser.add_argument("keeper_fd", type=int, nargs="?", help="a socket to who keeps it without a worker")
    given = parser.parse_args(argv)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the worker, which ends us
    server, keeper = Server(_connected(given.fd)), None
    if given.keeper_fd is not None:
        os.set_inheritable(given.keeper_fd, False)
        keeper = socket.socket(fileno=given.keeper_fd)
    while server.run() and keeper is not None and server.renew():
        parts = [process.pid for process in find_parts(os.getpid())]  # all of which have just answered
        if (sock := next_worker(keeper, parts)) is None:
            break
        server.connect(BeatingChannel(sock, FromWorker))
    sys.stdout.flush()
    os._exit(0)  # an engine's own teardown can hang; nothing is left to save


def _connected(descriptor: int) -> BeatingChannel:
    os.set_inheritable(descriptor, False)
    return BeatingChannel(socket.socket(fileno=descriptor), FromWorker)


if __name__ == "__main__":
    main()
