"""Watching the workers of a Ray run: their output, which failed first, was lost, or is silent or stuck.

Who is stopped, silent or stuck follows from what the actors answer (RayHealth), and is judged as elsewhere.
An actor that does not answer is for RankWatch to lose.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from siirl.config import from_dict
from siirl.deadline import Deadline
from siirl.launch.failure import Death, only_followers, write_failure
from siirl.launch.health import LOOK_S, STACKS_S, Health, Process, Trouble
from siirl.launch.job import Job
from siirl.launch.log_sizes import LogSizes
from siirl.launch.outcome import Stop
from siirl.launch.output_relay import ConsoleWriter
from siirl.launch.process import STACKS_TAKEN_S
from siirl.launch.ray_actor import Host, Reply
from siirl.launch.ray_cluster import LOST_AFTER_S, HeadWatch, Node, Stopped, alive_nodes
from siirl.observe.heartbeat import Beat
from siirl.observe.position import Position

TICK_S = 0.2
POLL_WAIT_S = 0.5
GATHER_S = 0.5  # after a first death, wait for those that follow: the one seen first need not be the first
REST_S = 3.0
ANSWER_S = 3.0
"""For an actor to signal its worker."""


@dataclass
class Rank:
    """One rank, seen from here: its actor, where that is, and what has arrived of its worker."""

    rank: int
    actor: Any
    node: Node
    host: Host
    fetched: int = 0
    """Bytes of output that have arrived."""
    replied_s: float = field(default_factory=time.monotonic)
    """When the actor last answered."""
    position: Position | None = None
    beat: Beat | None = None
    process: Process | None = None
    """The last two: as of the last answer."""
    pending: Any = None
    """The question that the actor has not answered yet."""
    ended: int | None = None
    """The worker's exit status."""
    death: Death | None = None
    lost: bool = False
    """The actor is gone or does not answer."""

    @property
    def place(self) -> str:
        return f"{self.host.name} ({self.node.ip})"


class RankWatch:
    """Asks every actor for news of its worker, again and again, and writes what arrives to the logs here."""

    def __init__(self, job: Job, ranks: Sequence[Rank], console: ConsoleWriter, stop: Stop):
        self._job, self._ranks, self._console, self._stop = job, ranks, console, stop

    def until_ended(self) -> list[Death]:
        """Wait until all have ended well, one has failed or will not go on: the deaths. Raises Stopped.

        After a first death all others must have answered once more or be lost, because a rank that is lost is
        noticed later than the failures that follow from it. HeadLost: the cluster has no head any more.
        """
        for rank in self._ranks:
            rank.replied_s = time.monotonic()
        import ray

        first_s, logs = None, LogSizes(self._job.log_dir)
        health = RayHealth(from_dict(self._job.config).trainer.stuck_s)
        head = HeadWatch(ray.get_runtime_context().gcs_address)
        while True:
            if self._stop.numbers:
                raise Stopped
            logs.look()
            head.look()
            self._collect()
            deaths = [rank.death for rank in self._ranks if rank.death]
            if not deaths and all(rank.ended == 0 for rank in self._ranks):
                return []
            running = [rank for rank in self._ranks if self._open(rank)]
            if not deaths and (found := health.trouble(running)) is not None:
                rank = self._ranks[found.rank]
                position = rank.position  # before a stopped one goes on
                health.show_stacks(found.rank, running)
                self.fetch_rest()
                return [Death(rank.rank, 1, time.time(), None, position, rank.host.name, found.what)]
            if deaths:
                first_s = first_s or time.monotonic()
                if all(rank.replied_s > first_s + GATHER_S for rank in running):
                    return self._deaths()

    def fetch_rest(self) -> None:
        """Fetch what the workers wrote before they ended; for a few seconds at most."""
        rest = Deadline(REST_S)
        while not rest.over and any(self._open(rank) for rank in self._ranks):
            self._collect()

    def _open(self, rank: Rank) -> bool:
        return rank.ended is None and not rank.lost

    def _collect(self) -> None:
        """Take the answers of the next moment, and ask those again that have answered."""
        import ray

        for rank in self._ranks:
            if self._open(rank) and rank.pending is None:
                rank.pending = rank.actor.poll.remote(rank.fetched, POLL_WAIT_S, self._console.window_size())
        waiting = {rank.pending: rank for rank in self._ranks if rank.pending is not None}
        if waiting:
            for ref in ray.wait(list(waiting), num_returns=len(waiting), timeout=TICK_S)[0]:
                self._take(waiting[ref])
        for rank in waiting.values():
            silent_s = time.monotonic() - rank.replied_s
            if self._open(rank) and silent_s > LOST_AFTER_S:
                self._lose(rank, f"its actor has not answered for {silent_s:.0f} s")

    def _take(self, rank: Rank) -> None:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        ref, rank.pending = rank.pending, None
        try:
            reply: Reply = ray.get(ref)
        except ActorUnavailableError:  # a broken connection: ask again until it counts as lost
            time.sleep(TICK_S)
            return
        except RayError as error:
            self._lose(rank, "its actor died", str(error))
            return
        rank.replied_s, rank.position = time.monotonic(), reply.position
        rank.beat, rank.process = reply.beat, reply.process
        rank.fetched += len(reply.output)
        if reply.output:
            self._write(rank, reply.output)
        rank.ended = reply.ended
        if reply.death is not None:
            rank.death = dataclasses.replace(reply.death, seen_s=time.time())

    def _write(self, rank: Rank, output: bytes) -> None:
        if rank.rank == 0:
            self._console.write(output)
            return
        with self._job.log_path(rank.rank).open("ab") as log:
            log.write(output)

    def _lose(self, rank: Rank, what: str, details: str = "") -> None:
        rank.lost, rank.pending = True, None
        memory = next((line.strip() for line in details.splitlines() if "memory" in line.lower()), "")
        what += f": {memory}" if memory else ""
        rank.death = Death(rank.rank, 1, time.time(), None, rank.position, rank.host.name, what)

    def _deaths(self) -> list[Death]:
        """All deaths, with their records written to this machine's folder of errors."""
        deaths = [rank.death for rank in self._ranks if rank.death]
        if only_followers(deaths):  # where is the rank that they waited for?
            for rank in self._ranks:
                if self._open(rank):
                    rank.actor.dump_stacks.remote()
            for _ in range(3):
                self._collect()
        alive = {node.node_id for node in alive_nodes()}
        for index, death in enumerate(deaths):
            rank = self._ranks[death.rank]
            if rank.lost and rank.node.node_id not in alive:
                deaths[index] = dataclasses.replace(
                    death, lost=f"its machine {rank.place} left the Ray cluster"
                )
            if death.failure is not None:
                write_failure(self._job.error_path(death.rank), death.failure)
        return deaths


class RayHealth:
    """Looks at the workers of all machines from time to time."""

    def __init__(self, patience_s: float):
        self._health = Health(patience_s)
        self._looked_s = 0.0

    def trouble(self, ranks: Sequence[Rank]) -> Trouble | None:
        """The first worker that will not go on, if a look is due and shows one. ranks: those that run.

        There is no look before all actors have answered since the last one: in time of which nothing is
        known, nobody was silent.
        """
        now_s = time.monotonic()
        heard_s = min((rank.replied_s for rank in ranks), default=0.0)
        if now_s < self._looked_s + LOOK_S or heard_s <= self._looked_s:
            return None
        self._looked_s = now_s
        beats = {rank.rank: rank.beat for rank in ranks}
        return self._health.look(now_s, beats, {rank.rank: rank.process for rank in ranks})

    def show_stacks(self, first: int, ranks: Sequence[Rank]) -> None:
        """All workers write their stacks. The one in trouble goes on for that if it was stopped.

        Meanwhile the others are held, and then all are killed: see Watch.show_stacks.
        """
        _answered([rank.actor.dump_stacks.remote() for rank in ranks])
        time.sleep(STACKS_S)
        (troubled,) = (rank for rank in ranks if rank.rank == first)
        if troubled.process is None or not troubled.process.is_stopped:
            return
        _answered([rank.actor.hold.remote() for rank in ranks if rank is not troubled])
        _answered([troubled.actor.go_on_for_stacks.remote()], STACKS_TAKEN_S + ANSWER_S)
        _answered([rank.actor.kill.remote() for rank in ranks if rank is not troubled])


def _answered(refs: list[Any], most_s: float = ANSWER_S) -> None:
    """Wait until these calls are done, or it takes too long."""
    import ray

    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=most_s)
