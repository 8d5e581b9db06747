"""Whom the episodes on a rank ask for turns, and whom its engines answer: at hand, or over TCP."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from siirl.agents.stream_client import StreamClient
from siirl.compiler.plan import InteractionPlan
from siirl.engines.rollout.base import Interrupt, RolloutEngine, RolloutStream
from siirl.engines.rollout.remote import Address, RemoteStream, StreamServer, gather_addresses
from siirl.errors import PeerError
from siirl.observe.spans import waiting

POLL_S, GOODBYE_S, PATIENCE_S = 0.05, 2.0, 0.01

Policies = dict[str, tuple[StreamClient, ...]]
"""Name of a rollout model -> its engines; an episode keeps to one of them."""


class Streams:
    """What this rank asks and answers in one interaction; used by one thread.

    Where episodes go on while others train (`peers`), its services go on as well, and answer under whatever
    weights come. All who ask and answer then meet twice in a step. Before an episode of it begins, engines
    have the weights of the step: so the bound on staleness holds for what they answer. And before they take
    newer ones, the step has its episodes: so a failure is raised by the rank whose it is. Nobody is held up
    by that, as newer weights come of these episodes.
    """

    def __init__(
        self,
        plan: InteractionPlan,
        rank: int,
        engines: Mapping[str, RolloutEngine],
        group: dist.ProcessGroup,
        deadline_s: float,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        """engines: of this rank, by model. Collective over `group`, the world, if any policy is served.
        peers: those that ask and answer (InteractionPlan.connected), if episodes go on while others train.
        """
        self._plan, self._rank, self._engines, self._deadline_s = plan, rank, engines, deadline_s
        self._peers = peers
        self._kept: list[Service] = []
        self._servers: dict[str, StreamServer] = {}
        self._addresses: dict[str, dict[int, Address]] = {}
        for name in dict.fromkeys(stream.policy for stream in plan.streams):
            if clients := plan.clients(name, rank):
                self._servers[name] = StreamServer(name, rank, deadline_s, len(clients))
            server = self._servers.get(name)
            self._addresses[name] = gather_addresses(server.address if server else None, group)

    def shares(self, policy: str) -> tuple[int, ...]:
        """How the episodes of this rank are shared out to the engines of a policy (StreamPlan.shares)."""
        return self._plan.shares(policy, self._rank)

    @contextmanager
    def step(self) -> Iterator[dict[str, int]]:
        """Around what is asked and answered in a step or a validation: policy -> version of its weights,
        where that is known here. Collective over the peers; errors as of `serve`.
        """
        mine = [name for name in self._plan.policies if name in self._engines]
        versions = {name: self._engines[name].weight_version for name in mine}
        if self._peers is None:
            yield versions
            return
        self._kept = self._kept or self._serving()
        found: list[Any] = [None] * dist.get_world_size(self._peers)
        with waiting():
            dist.all_gather_object(found, versions, group=self._peers)
        yield {name: version for part in found for name, version in part.items()}
        with waiting():  # but not until it is over: this rank answers meanwhile
            over = dist.all_reduce(torch.zeros(1), group=self._peers, async_op=True)
        assert over is not None  # this rank is one of them
        while not over.is_completed():
            self._raise_failed(self._kept)
            time.sleep(PATIENCE_S)
        over.wait()

    def serve(self) -> None:
        """Answer until every driver that asks an engine of this rank is done with the step.

        RolloutError or DeadlineError when an engine or a driver fails, dies or falls silent.
        """
        with self.step():
            if self._peers is None:
                self._wait(self._serving())

    @contextmanager
    def open(
        self, interrupt: Interrupt | None = None, runs_in_background: bool = False
    ) -> Iterator[Policies]:
        """The policies, for a rank that plays episodes; its engines answer other drivers as well.

        interrupt, runs_in_background: see RolloutEngine.stream, of engines of this rank that serve nobody
        else.

        What is raised inside is told to those who serve this rank. At the end it waits for the drivers that
        it serves, and raises as `serve` does.
        """
        opened: list[RemoteStream] = []
        serving = self._kept or self._serving()
        try:
            with ExitStack() as stack:
                policies: Policies = {}
                for name in self._plan.policies:
                    heads = self._plan.heads(name, self._rank)
                    how = (opened, interrupt, runs_in_background)
                    stream_clients = [self._stream_client(name, head, *how) for head in heads]
                    policies[name] = tuple(stack.enter_context(client) for client in stream_clients)
                try:
                    yield policies
                except BaseException as error:
                    for stream in opened:
                        stream.fail(f"{type(error).__name__}: {error}")
                    raise
        except PeerError as error:  # our own engine may be that peer
            for service in serving:
                service.join(GOODBYE_S)
                if service.error is not None and not isinstance(service.error, PeerError):
                    raise service.error from error
            raise
        if self._peers is None:
            self._wait(serving)

    def close(self) -> None:
        """Stop listening, and answering. Idempotent."""
        for server in self._servers.values():
            server.close()
        for service in self._kept:
            service.join(GOODBYE_S)

    def _stream_client(
        self,
        name: str,
        head: int,
        opened: list[RemoteStream],
        interrupt: Interrupt | None,
        runs_in_background: bool,
    ) -> StreamClient:
        """The policy that the engine of one rank answers for."""

        def connect() -> RemoteStream:
            stream = RemoteStream(self._addresses[name][head], self._rank, self._deadline_s)
            opened.append(stream)
            return stream

        served = self._plan.clients(name, head)
        own = self._engines.get(name)
        open_stream = connect if served or own is None else partial(own.stream, interrupt, runs_in_background)
        return StreamClient(open_stream, name, self._deadline_s, 0.0 if interrupt is None else PATIENCE_S)

    def _serving(self) -> list["Service"]:
        """Start to serve other drivers."""
        mine = [self._engines[name] for name in self._plan.policies if name in self._engines]
        for engine in mine:
            engine.num_open_streams = sum(type(other) is type(engine) for other in mine)
        stays = self._peers is not None
        return [
            Service(server, self._engines[name], self._plan.clients(name, self._rank), stays)
            for name, server in self._servers.items()
        ]

    def _wait(self, serving: list["Service"]) -> None:
        """Until all have ended. Raises what ended the first that failed."""
        while any(service.is_alive() for service in serving):
            serving[0].join(POLL_S)
            self._raise_failed(serving)
        self._raise_failed(serving)

    def _raise_failed(self, serving: list["Service"]) -> None:
        """What ended the first that failed."""
        for service in serving:
            if service.error is not None:
                raise service.error


class Service(threading.Thread):
    """Serves one engine to the drivers of one interaction, beside other work of this rank."""

    def __init__(
        self, server: StreamServer, engine: RolloutEngine, clients: tuple[int, ...], stays: bool
    ) -> None:
        """Returns when the engine's stream is open, so that it is held where weights come next. stays: see
        StreamServer.serve."""
        super().__init__(name=f"service of {engine.name}", daemon=True)
        self._server, self._engine, self._clients, self._stays = server, engine, clients, stays
        self.error: BaseException | None = None  # why it ended, if it failed
        self._begun = threading.Event()
        self.start()
        self._begun.wait()

    def run(self) -> None:
        """The thread: open the engine's stream, answer, close it."""
        try:
            self._server.serve(self._open, self._clients, self._stays)
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: raised again by who waits
            self.error = error
        finally:
            self._begun.set()

    def _open(self, interrupt: Interrupt) -> RolloutStream:
        stream = self._engine.stream(interrupt, runs_in_background=self._stays)
        self._begun.set()
        return stream
