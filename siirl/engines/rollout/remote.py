"""A stream of requests served to other ranks of the run, over TCP.

The rank that has the engine makes a StreamServer once; addresses reach the other ranks by `gather_addresses`.
For each interaction, or once for all, it then calls `serve`, while every client rank opens a RemoteStream,
uses it like any stream, and closes it. A connection begins with the server's random token, which only ranks
of the run know; before it nothing is read. Then come typed messages, a Hello first. Each side says Alive
about every second.
"""

import contextlib
import dataclasses
import hmac
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from siirl.access import MOST_UNAUTHENTICATED, UnauthenticatedConnections, own_host, shut
from siirl.data.completions import Completion, Key, Request
from siirl.deadline import Deadline
from siirl.engines.rollout.base import Interrupt, RolloutStream, check_keys
from siirl.engines.rollout.channel import Channel, ChannelClosed
from siirl.engines.rollout.served.messages import (
    Alive,
    Answer,
    Done,
    Failed,
    Finished,
    FromClient,
    FromServer,
    Hello,
    Pause,
    Submit,
    Unanswered,
)
from siirl.errors import DeadlineError, EpisodeFailed, PeerError, RolloutError
from siirl.observe.printable import printable

ALIVE_EVERY_S, POLL_S, COLLECT_S, HELLO_S, GOODBYE_S = 1.0, 0.5, 0.002, 10.0, 2.0
TOKEN_BYTES = 32


@dataclass(frozen=True)
class Address:
    """Where a rank serves its engine."""

    model: str
    rank: int
    host: str
    port: int
    token: bytes = field(repr=False)
    """A secret of the run: it belongs into no log."""


def gather_addresses(mine: Address | None, group: dist.ProcessGroup) -> dict[int, Address]:
    """Rank -> address, of the ranks of a group that serve. Collective over the group."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    return {address.rank: address for address in parts if address is not None}


class Connection:
    """One client's stream, at the server: what it has said and has not been read."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank, self.channel = rank, channel
        self.inbox: deque[FromClient | None] = deque()  # None: the end

    def refuse(self, text: str) -> None:
        """Say why there will be no more answers."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(Failed(printable(text)))


class StreamServer:
    """Listens from its start on; `serve` answers. Used by one thread; others, of its own, only read."""

    def __init__(self, model: str, rank: int, deadline_s: float, num_clients: int = 1) -> None:
        """model: whose engine is served, for messages. deadline_s: of every wait for a client."""
        self._deadline_s = deadline_s
        self._socket = _listening(own_host())
        host, port = self._socket.getsockname()[:2]
        self.address = Address(model, rank, host, port, secrets.token_bytes(TOKEN_BYTES))
        self._news = threading.Condition()
        self._failure: str | None = None  # why nobody is answered any more
        self._unauthenticated = UnauthenticatedConnections(MOST_UNAUTHENTICATED + 2 * num_clients)
        self._closed = False
        self._arrived: dict[int, deque[Connection]] = defaultdict(deque)
        threading.Thread(target=self._accept, name=f"door of {model}", daemon=True).start()

    def serve(
        self, open_stream: Callable[[Interrupt], RolloutStream], clients: Sequence[int], stays: bool = False
    ) -> None:
        """Answer the next stream of each client rank, until each has closed it.

        open_stream: `RolloutEngine.stream`; it comes back where a client takes back what it has asked.
        stays: answer the streams that they open afterwards, too, until `close`.
        RolloutError when the engine fails; PeerError when a client fails or dies; DeadlineError for one that
        never comes or falls silent. Whatever is raised, all clients get to know, also those that come later:
        nobody is served after it. Without clients nothing is opened.
        """
        if not clients:
            return
        session = None
        try:
            opened: dict[int, Connection] = {}
            session = Session(self.address, open_stream(lambda _: self._is_pausing(opened)), opened)
            self._serve(session, clients, stays)
        except BaseException as error:
            self._fail(session, str(error))
            raise
        finally:
            if session is not None:
                session.close()

    def close(self) -> None:
        """Stop listening, also where a thread waits for a client already. Idempotent."""
        with self._news:
            self._closed = True
            self._news.notify()
        shut(self._socket)
        self._socket.close()

    def _serve(self, session: "Session", clients: Sequence[int], stays: bool) -> None:
        silent = {rank: Deadline(self._deadline_s) for rank in clients}
        coming = set(clients)
        while not self._closed if stays else coming or session.open:
            with self._news:
                if not session.stream.num_pending:
                    self._news.wait_for(lambda: self._has_news(session, coming), POLL_S)
                for rank in sorted(coming):
                    if self._arrived[rank]:
                        session.open[rank] = self._arrived[rank].popleft()
                        silent[rank].renew()
                        coming.discard(rank)
                messages = []
                for rank, connection in session.open.items():
                    messages += [(rank, message) for message in connection.inbox]
                    connection.inbox.clear()
            for rank, message in messages:
                silent[rank].renew()
                session.hear(rank, message)
            session.answer()
            if stays:
                coming.update(set(clients).difference(session.open))
            for rank in session.open if stays else [*coming, *session.open]:
                if silent[rank].over:
                    raise self._late(rank, rank in coming)

    def _fail(self, session: "Session | None", text: str) -> None:
        """Tell everybody who has come, and whoever still comes, why there are no more answers."""
        with self._news:
            self._failure = text
            here = [connection for arrived in self._arrived.values() for connection in arrived]
        for connection in [*here, *(session.open.values() if session else ())]:
            connection.refuse(text)

    def _is_pausing(self, opened: dict[int, Connection]) -> bool:
        with self._news:
            return self._closed or any(
                isinstance(said, Pause) for one in opened.values() for said in one.inbox
            )

    def _has_news(self, session: "Session", coming: set[int]) -> bool:
        come = any(self._arrived[rank] for rank in coming)
        return self._closed or come or any(connection.inbox for connection in session.open.values())

    def _late(self, rank: int, missing: bool) -> DeadlineError:
        what = "did not open its stream" if missing else "said nothing"
        return DeadlineError(
            f"rank {rank} {what} within {self._deadline_s:g} s, while rank {self.address.rank} serves "
            f"{self.address.model!r} to it: it hangs, or works on something else for longer. "
            "Look at its log, or raise trainer.deadline_s."
        )

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._socket.accept()
            except OSError:  # closed; or a client went before it was let in, or there are too many open files
                time.sleep(COLLECT_S)
                continue
            self._unauthenticated.come(sock, peer[0], partial(shut, sock))
            threading.Thread(target=self._read, args=(sock,), daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        """Read what one client says, so that it can always send; unauthenticated ones are sent away."""
        connection, channel = None, Channel(sock, FromClient)
        try:
            sock.settimeout(HELLO_S)
            if not hmac.compare_digest(channel.read(TOKEN_BYTES), self.address.token):
                return
            self._unauthenticated.left(sock)
            _configure(sock, self._deadline_s)
            hello = channel.receive()
            if not isinstance(hello, Hello):
                return
            connection = Connection(hello.rank, channel)
            with self._news:
                self._arrived[connection.rank].append(connection)
                failure = self._failure
                self._news.notify()
            if failure is not None:
                connection.refuse(failure)
            while True:
                self._put(connection, channel.receive())
        except (ChannelClosed, OSError):
            pass
        finally:
            self._unauthenticated.left(sock)
            channel.close()
            if connection is not None:
                self._put(connection, None)

    def _put(self, connection: Connection, message: FromClient | None) -> None:
        with self._news:
            connection.inbox.append(message)
            self._news.notify()


class Session:
    """One interaction at the server: the engine's stream, and the clients whose requests it holds."""

    def __init__(self, address: Address, stream: RolloutStream, opened: dict[int, Connection]) -> None:
        """opened: the connections, which it changes."""
        self.address, self.stream, self.open = address, stream, opened
        self._asked: dict[Key, tuple[int, Key]] = {}  # key in the stream -> client and its own key
        self._num_asked = 0
        self._speaks = Deadline(ALIVE_EVERY_S)

    def hear(self, rank: int, message: FromClient | None) -> None:
        """Take a message of a client; None: it has gone. PeerError if it has failed, or gone too early."""
        match message:
            case Submit(requests):
                numbered = dict(enumerate(requests, self._num_asked))
                self._num_asked += len(numbered)
                self._asked |= {number: (rank, request.key) for number, request in numbered.items()}
                self.stream.submit([dataclasses.replace(r, key=number) for number, r in numbered.items()])
            case Pause():
                self._hand_out(
                    self.stream.pause({key for key, (asker, _) in self._asked.items() if asker == rank})
                )
            case Done():
                self.open.pop(rank).channel.close()
            case Failed(reason):
                raise PeerError(f"rank {rank}, which {self._service()} to, failed: {reason}")
            case None if rank in self.open:
                raise self._gone(rank)

    def answer(self) -> None:
        """Hand out what has completed, and say that we are alive. PeerError if a client has gone."""
        self._hand_out(self.stream.collect(COLLECT_S))
        if self._speaks.due():
            for rank in self.open:
                self._send(rank, Alive())

    def close(self) -> None:
        for connection in self.open.values():
            connection.channel.close()
        self.stream.close()

    def _hand_out(self, answers: Sequence[tuple[Key, Completion | EpisodeFailed]]) -> None:
        for key, answer in answers:
            rank, own_key = self._asked.pop(key)
            if rank in self.open:  # else it closed its stream before
                self._send(rank, _answer(own_key, answer))

    def _send(self, rank: int, message: FromServer) -> None:
        try:
            self.open[rank].channel.send(message)
        except ChannelClosed:
            raise self._gone(rank) from None

    def _gone(self, rank: int) -> PeerError:
        return PeerError(
            f"rank {rank} has gone before it closed its stream of {self.address.model!r}, which rank "
            f"{self.address.rank} serves: it died or failed. Look at its log."
        )

    def _service(self) -> str:
        return f"rank {self.address.rank} serves {self.address.model!r}"


class RemoteStream(RolloutStream):
    """The stream of an engine on another rank."""

    def __init__(self, address: Address, rank: int, deadline_s: float) -> None:
        """Connect, as this rank. PeerError if nobody listens."""
        super().__init__()
        self._address, self._silent = address, Deadline(deadline_s)
        self._pending: set[Key] = set()
        self._sending = threading.Lock()
        self._closed = threading.Event()
        try:
            sock = socket.create_connection((address.host, address.port), deadline_s)
            _configure(sock, deadline_s)
            sock.sendall(address.token)
        except OSError as error:
            raise PeerError(f"{self._server()} cannot be reached: {error}. Look at its log.") from error
        self._channel = Channel(sock, FromServer)
        self._send(Hello(rank))
        threading.Thread(target=self._say_alive, daemon=True).start()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream; the server judges the requests, its errors come with `collect`."""
        if not requests:
            return
        check_keys(requests, self._pending)
        if not self._pending:
            self._silent.renew()
        self._send(Submit(list(requests)))
        self._pending |= {request.key for request in requests}

    def collect(self, timeout_s: float) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream. PeerError when the server failed or died; DeadlineError when it hangs."""
        answers: list[tuple[Key, Completion | EpisodeFailed]] = []
        wait = Deadline(timeout_s)
        while self._pending:
            if self._channel.ready(0.0 if answers else min(POLL_S, wait.left_s)):
                answers += self._received()
            elif answers or wait.over:
                break
            elif self._silent.over:
                raise DeadlineError(
                    f"{self._server()} said nothing for {self._silent.wait_s:g} s, while {self.num_pending} "
                    "requests wait for it: it hangs, or works on something else for longer. Look at its log, "
                    "or raise trainer.deadline_s."
                )
        return answers

    def pause(self, keys: Collection[Key] | None = None) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream: all of it, whatever keys; errors as of collect."""
        if self._pending:
            self._send(Pause())
        answers: list[tuple[Key, Completion | EpisodeFailed]] = []
        while self._pending:
            answers += self.collect(POLL_S)
        return answers

    def fail(self, text: str) -> None:
        """Tell the server that this rank cannot go on, and why; from any thread. Then close the stream."""
        with contextlib.suppress(RolloutError):
            self._send(Failed(printable(text)))

    def close(self) -> None:
        """See RolloutStream. The server is told that this rank is done."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(RolloutError, ChannelClosed):
                self._send(Done())
                while self._channel.ready(GOODBYE_S):  # closing over unread answers could lose our last word
                    self._channel.receive()
            self._channel.close()
        self._pending = set()

    def _received(self) -> list[tuple[Key, Completion | EpisodeFailed]]:
        try:
            message = self._channel.receive()
        except ChannelClosed:
            raise self._death() from None
        self._silent.renew()
        match message:
            case Failed(reason):
                raise PeerError(f"{self._server()} failed: {reason}")
            case Finished(answers):
                found: list[tuple[Key, Completion | EpisodeFailed]] = [
                    (one.key, one.completion) for one in answers
                ]
            case Unanswered(key, reason, why):
                found = [(key, EpisodeFailed(reason, why))]
            case _:
                return []
        for key, _ in found:
            if key not in self._pending:
                raise PeerError(f"{self._server()} answers {key!r}, which nobody has asked. Look at its log.")
            self._pending.remove(key)
        return found

    def _send(self, message: FromClient) -> None:
        try:
            with self._sending:
                self._channel.send(message)
        except ChannelClosed:
            raise self._death() from None

    def _say_alive(self) -> None:
        with contextlib.suppress(RolloutError):  # `collect` will find out
            while not self._closed.wait(ALIVE_EVERY_S):
                self._send(Alive())

    def _server(self) -> str:
        where = f"{self._address.host}:{self._address.port}"
        return f"rank {self._address.rank} ({where}), which serves {self._address.model!r},"

    def _death(self) -> PeerError:
        return PeerError(
            f"{self._server()} has gone while {self.num_pending} requests wait for it: it died or failed. "
            "Look at its log."
        )


def _listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def _configure(sock: socket.socket, deadline_s: float) -> None:
    """Small messages go out at once; a send that nobody reads ends after the deadline."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(deadline_s) + 1, 0))


def _answer(key: Key, answer: Completion | EpisodeFailed) -> Finished | Unanswered:
    if isinstance(answer, EpisodeFailed):
        return Unanswered(key, printable(str(answer)), answer.kind)
    return Finished([Answer(key, answer)])
