"""The HTTP server and the desk in a process of their own: requests are read while the worker computes.

In one process they would take turns, as Python runs one thread at a time. The worker forks this process, so
it is there at once, with what the worker has imported. What they say to each other is pickled, as both are
one program. It ends with the worker, however that ends, and the worker's attempt ends with it.

consumes: what the worker says. produces: requests, as commands. waits for: the worker, and for the next
command as long as that says. unblocked by: these, and the end of the worker.
"""

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from siirl.errors import RequestError
from siirl.service.desk import Answered, Desk, Ticket
from siirl.service.request_journal import Kept
from siirl.service.service_endpoint import Served, ServiceEndpoint

log = logging.getLogger(__name__)
END_S, POLL_S = 5.0, 0.02
"""How long the process has to tell its clients that it is over, and how often it is looked whether it has."""


@dataclass(frozen=True)
class Opening:
    """What it begins with."""

    host: str
    port: int
    kept: Sequence[Kept]
    """Models of an earlier server, without states and commands."""
    lost: Container[str]
    """Those whose requests are all refused."""
    alone: Container[str]
    """Ids of requests that are carried out by themselves."""


@dataclass(frozen=True)
class Taking:
    """The next commands are asked for."""

    timeout_s: float
    most_samples: int


class ServerProcess:
    """The worker's side: a desk that is elsewhere. RequestError where the process has died."""

    def __init__(self, desk: Desk, served: Served, files: Path, keys: Mapping[str, str]) -> None:
        """Fork. desk: nobody has used it. Others: of ServiceEndpoint."""
        self.num_sessions = 0
        """When commands were asked for last."""
        self._pipe, theirs = Pipe()
        life, self._life = os.pipe()
        with warnings.catch_warnings():  # other threads may hold locks: none of those that are used there
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            os.close(self._life)
            _run(theirs, life, desk, served, files, keys)
        theirs.close()
        os.close(life)

    def open(
        self, address: str, kept: Sequence[Kept], lost: Iterable[str], alone: Container[str]
    ) -> tuple[str, list[str]]:
        """Go on with an earlier server's sessions, and listen: the URL, and which of `kept` belong to none of
        them. ConfigError if that cannot be."""
        host, _, port = address.rpartition(":")
        names = [replace(one, state=None, commands=[]) for one in kept]
        found = self._asked(Opening(host.strip("[]"), int(port), names, frozenset(lost), alone))
        if isinstance(found, Exception):
            raise found
        return found

    def take_together(self, timeout_s: float, most_samples: int) -> list[Ticket]:
        """As Desk has it."""
        found, self.num_sessions = self._asked(Taking(timeout_s, most_samples))
        return [Ticket(id, command, "") for id, command in found]

    def answer(self, answers: Sequence[Answered]) -> None:
        """As Desk has it; nothing is waited for."""
        with self._alive():
            self._pipe.send([(ticket.id, *rest) for ticket, *rest in answers])

    def _asked(self, what: Opening | Taking) -> Any:
        with self._alive():
            self._pipe.send(what)
            return self._pipe.recv()

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise RequestError(f"the process that answers clients (pid {self.pid}) {self._end()}") from error

    def _end(self) -> str:
        """How it has ended, once it has."""
        end_s, status = time.monotonic() + END_S, (0, 0)
        with contextlib.suppress(ChildProcessError):
            while not (status := os.waitpid(self.pid, os.WNOHANG))[0] and time.monotonic() < end_s:
                time.sleep(POLL_S)
        code = os.waitstatus_to_exitcode(status[1])
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "has ended (its log says why)"
        return how + (". Often that is the out-of-memory killer" if code == -signal.SIGKILL else "")

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        if not self.pid:
            return
        self._pipe.close()
        end_s = time.monotonic() + 2 * END_S
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            while not os.waitpid(self.pid, os.WNOHANG)[0]:
                if time.monotonic() > end_s:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(POLL_S)
        os.close(self._life)
        self.pid = 0


def _run(
    pipe: Connection, life: int, desk: Desk, served: Served, files: Path, keys: Mapping[str, str]
) -> NoReturn:
    """The process, until the worker closes its end of the pipe, or dies."""
    gc.freeze()  # what the worker has made is its own: nothing of it is looked through, or ends here
    try:
        for number in (signal.SIGTERM, signal.SIGINT):  # of the rank's group: the worker says when it is over
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=[life], name="lifeline", daemon=True).start()
        endpoint, taken = ServiceEndpoint(desk, served, files, keys), dict[str, Ticket]()
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                match pipe.recv():
                    case Opening() as opening:
                        pipe.send(_opened(endpoint, desk, opening))
                    case Taking(timeout_s, most_samples):
                        taken = {one.id: one for one in desk.take_together(timeout_s, most_samples)}
                        pipe.send(([(id, one.command) for id, one in taken.items()], endpoint.num_sessions))
                    case answers:
                        desk.answer([(taken[id], answer, tokens) for id, answer, tokens in answers])
        threading.Timer(END_S, os._exit, [1]).start()
        endpoint.close()
    except BaseException:
        log.exception("the process that answers clients ends")
    os._exit(0)


def _opened(endpoint: ServiceEndpoint, desk: Desk, opening: Opening) -> Any:
    try:
        desk.alone = opening.alone
        gone = endpoint.restore(opening.kept, opening.lost)
        endpoint.start(opening.host, opening.port)
    except Exception as error:  # noqa: BLE001 - the edge to the worker, which raises it
        return error
    return endpoint.url, gone


def _end_with(life: int) -> None:
    """Nobody else has the other end: it closes when the worker ends."""
    os.read(life, 1)
    os._exit(0)
