"""The process of an engine: driven by its worker's messages over a socket.

    python -m siirl.engines.rollout.served.server FD

FD: the inherited socket. What is said over it stands in messages.py. The process ends with its worker. The
requests of a Submit join those that run, and those that a step has completed are told by a Finished, whatever
else the worker sends; what it does not read yet waits here, and the engine goes on. While it generates, the
process says Alive about every second, from the thread that runs the engine: one that hangs falls silent.
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
from collections.abc import Callable
from typing import Any

from siirl.deadline import Deadline
from siirl.engines.rollout.channel import Channel, ChannelClosed, Message
from siirl.engines.rollout.served.messages import (
    Abort,
    Alive,
    Answer,
    Beat,
    Call,
    Done,
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
from siirl.errors import UserError
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


ALIVE_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1


class Server:
    """Answers the messages of its worker with one engine."""

    def __init__(self, channel: Channel) -> None:
        self._engine: Any = None
        self._running: set[str] = set()  # requests of the stream
        self._speaks = Deadline(ALIVE_EVERY_S)
        self._channel = channel
        self._inbox: queue.Queue[FromWorker | None] = queue.Queue()
        self._outbox: queue.Queue[FromEngine | None] = queue.Queue()

    def run(self) -> None:
        """Until the worker closes the channel or says Stop."""
        # Threads of their own: the worker can always send, and the engine go on, while neither is read.
        for work, box in ((_read, self._inbox), (_write, self._outbox)):
            threading.Thread(target=work, args=(self._channel, box), daemon=True).start()
        while True:
            while self._running and self._inbox.empty():
                self._guarded(True, self._advance)
            match self._inbox.get():
                case None | Stop():
                    return
                case Submit() as submitted:
                    self._guarded(True, self._submit, submitted)
                case message:
                    self._guarded(False, self._answer, message)

    def _answer(self, message: FromWorker) -> None:
        answer: Done | Scored | Paused = Done()
        match message:
            case Start(native, arguments):
                with names_noted():
                    self._engine = importlib.import_module(native).NativeEngine(arguments)
            case Call(method, arguments):
                answer = Done(getattr(self._engine, method)(**arguments))
            case Score():
                answer = self._score(message)
            case Pause(names):
                answer = Paused(self._pause(names or []))
            case Abort():
                self._abort()
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
            text = str(error) if known else f"{type(error).__name__}: {error}"
            self._outbox.put(Failed(printable(text), known, of_stream))

    def _submit(self, submitted: Submit) -> None:
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
        for number, tokens in enumerate(asked.rows):
            self._engine.add_scored(number, tokens, asked.top_k)
        scores: dict[int, RowScores] = {}
        while len(scores) < len(asked.rows):
            scores |= self._engine.step_scored(asked.starts)
            self._say_alive(f"{len(scores)} of {len(asked.rows)} rows are read")
        return Scored([scores[number] for number in range(len(asked.rows))])

    def _say_alive(self, progress: str) -> None:
        """To the worker."""
        if self._speaks.due():
            self._outbox.put(Alive(progress))


def _read(channel: Channel, inbox: queue.Queue[FromWorker | None]) -> None:
    with contextlib.suppress(ChannelClosed):
        while True:
            inbox.put(channel.receive())
    inbox.put(None)


def _write(channel: Channel, outbox: queue.Queue[FromEngine | None]) -> None:
    with contextlib.suppress(ChannelClosed):
        while (message := outbox.get()) is not None:
            channel.send(message)
            outbox.task_done()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="an engine of a siirl run; started by a worker")
    parser.add_argument("fd", type=int)
    given = parser.parse_args(argv)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the worker, which ends us
    os.set_inheritable(given.fd, False)
    Server(BeatingChannel(socket.socket(fileno=given.fd), FromWorker)).run()
    sys.stdout.flush()
    os._exit(0)  # an engine's own teardown can hang; nothing is left to save


if __name__ == "__main__":
    main()
