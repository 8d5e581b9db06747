"""Which worker is stopped, silent or stuck, by its heartbeats and what the kernel says of it. No torch.

A rank that waits for one that is behind it is never the one: the first of them is.

consumes      a look at every rank, about once a second: its last beat, its process's state and CPU time
produces      the first rank that will not go on, with the ranks that wait for it
"""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from siirl.launch.process import Worker
from siirl.observe.curve import duration
from siirl.observe.heartbeat import Beat, Place, read_beat
from siirl.parallel.placement import format_ranks

LOOK_S, MOST_LOOK_S = 1.0, 2.0
"""A look, and how much time one counts at most: while the launcher stood still, nobody was silent."""
STOPPED_S, SILENT_S, FACTOR, KNOWN_TIMES = 5.0, 20.0, 10.0, 2
WRITES, WRITES_FACTOR = ("start", "checkpoint", "after checkpoint", "export"), 6.0
"""Places in which a slow disk may hold a whole process: patience is so many times as long."""
STACKS_S = 1.0
"""How long workers take to write them."""
NO_PROGRESS_S = 0.05
"""CPU time in a silence that is none."""


@dataclass(frozen=True)
class Process:
    """What the kernel says of a process."""

    state: str
    """T: stopped by a signal; see proc(5)."""
    cpu_s: float

    @property
    def is_stopped(self) -> bool:
        return self.state == "T"


@dataclass(frozen=True)
class Trouble:
    """A rank that will not go on."""

    rank: int
    what: str
    """For the user."""


@dataclass
class _Seen:
    """What has been seen of a rank."""

    beat: Beat | None = None
    cpu_s: float = 0.0
    """At its last beat."""
    silent_s: float = 0.0
    stay_s: float = 0.0
    """In the place where it is."""
    stopped_s: float = 0.0

    @property
    def place(self) -> Place:
        return self.beat.place if self.beat else Place()

    @property
    def part(self) -> str:
        """The name of the place, without what it is a part of."""
        return self.place.name.rpartition("/")[2]


@dataclass
class Health:
    """Looks at all ranks, and remembers how long they were silent in each place."""

    patience_s: float
    """How long a rank may stay where it is, whatever was before."""
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _silences: dict[str, float] = field(
        default_factory=dict
    )  # the longest in a place that was followed by a beat
    _last_s: float | None = None

    def look(
        self, now_s: float, beats: Mapping[int, Beat | None], processes: Mapping[int, Process | None]
    ) -> Trouble | None:
        """One look at the ranks that run; the first trouble. Ranks that have ended are left out."""
        passed_s = 0.0 if self._last_s is None else min(now_s - self._last_s, MOST_LOOK_S)
        self._last_s = now_s
        self._seen = {rank: self._seen.get(rank, _Seen()) for rank in beats}
        for rank, seen in self._seen.items():
            self._update(seen, passed_s, beats[rank], processes.get(rank))
        for judge in (self._stopped, self._silent, self._stuck):
            found = {rank: what for rank in self._seen if (what := judge(rank))}
            if found:
                first = min(found, key=self._order)
                return Trouble(first, found[first] + self._waiting(first))
        return None

    def _update(self, seen: _Seen, passed_s: float, beat: Beat | None, process: Process | None) -> None:
        stopped = process is not None and process.is_stopped
        seen.stopped_s = seen.stopped_s + passed_s if stopped else 0.0
        if stopped:
            return
        seen.stay_s += passed_s
        cpu_s = process.cpu_s if process else 0.0
        if beat is None or (seen.beat is not None and beat.count == seen.beat.count):
            works = cpu_s - seen.cpu_s > NO_PROGRESS_S  # code that holds the interpreter
            seen.silent_s = 0.0 if works else seen.silent_s + passed_s
            seen.cpu_s = cpu_s if works else seen.cpu_s
            return
        name = seen.place.name
        self._silences[name] = max(self._silences.get(name, 0.0), seen.silent_s)
        if seen.beat is None or beat.entered != seen.beat.entered:
            seen.stay_s = 0.0
        seen.beat, seen.cpu_s, seen.silent_s = beat, cpu_s, 0.0

    def _stopped(self, rank: int) -> str:
        stopped_s = self._seen[rank].stopped_s
        if stopped_s < STOPPED_S:
            return ""
        return f"it was stopped by a signal (process state T) {duration(stopped_s)} ago"

    def _silent(self, rank: int) -> str:
        seen = self._seen[rank]
        limit_s = max(SILENT_S, FACTOR * self._silences.get(seen.place.name, 0.0))
        if seen.place.times < KNOWN_TIMES or seen.part in WRITES:
            limit_s = max(limit_s, self._patience_s(seen))
        if seen.silent_s < limit_s:
            return ""
        return f"it gives no heartbeat and uses no CPU, for {duration(seen.silent_s)} now"

    def _stuck(self, rank: int) -> str:
        """Judged is who is behind all others, in a place that has been left before."""
        seen = self._seen[rank]
        longest_s = self._longest_s(seen.place.name)
        if seen.stay_s < max(self._patience_s(seen), FACTOR * longest_s) or seen.place.times < KNOWN_TIMES:
            return ""
        if self._order(rank)[:2] > min(self._order(other)[:2] for other in self._seen):
            return ""
        stay, longest = duration(seen.stay_s), duration(longest_s)
        return f"it has been in {seen.place.name!r} for {stay}; the longest before was {longest}"

    def _patience_s(self, seen: _Seen) -> float:
        return self.patience_s * (WRITES_FACTOR if seen.part in WRITES else 1.0)

    def _longest_s(self, name: str) -> float:
        """The longest stay in a place that a rank has left."""
        known = (seen.place.longest_s for seen in self._seen.values() if seen.place.name == name)
        return max(known, default=0.0)

    def _order(self, rank: int) -> tuple[bool, tuple[int, ...], int]:
        """Who is behind comes first; a rank that answers others waits for them, wherever it is."""
        seen = self._seen[rank]
        return seen.part == "serve", seen.place.order, rank

    def _waiting(self, rank: int) -> str:
        """Those that are beside a rank (stacks tell which of them holds the others), and ahead of it."""
        own, others = self._order(rank)[:2], sorted(set(self._seen) - {rank})
        beside = [other for other in others if self._order(other)[:2] == own]
        ahead = [other for other in others if self._order(other)[:2] > own]
        told = f"; in the same place: {format_ranks(beside)}" if beside else ""
        return told + (f"; ahead of it, and waiting: {format_ranks(ahead)}" if ahead else "")


class Watch:
    """Looks at the workers of this machine from time to time."""

    def __init__(self, workers: Sequence[Worker], heartbeat_fd: int, patience_s: float):
        self._workers, self._fd = workers, heartbeat_fd
        self._health = Health(patience_s)
        self._next_s = 0.0

    def trouble(self) -> Trouble | None:
        """The first worker that will not go on, if a look is due and shows one."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + LOOK_S
        running = [worker for worker in self._workers if not worker.ended()]
        beats = {worker.rank: read_beat(self._fd, worker.rank) for worker in running}
        processes = {worker.rank: look_at(worker.process.pid) for worker in running}
        return self._health.look(now_s, beats, processes)

    def show_stacks(self, rank: int) -> None:
        """All workers write their stacks. The one in trouble goes on for that if it was stopped.

        Meanwhile the others are stopped, and then all are killed: it may not complete a checkpoint with them,
        and end before it has reported the step.
        """
        running = [worker for worker in self._workers if not worker.ended()]
        for worker in running:
            worker.dump_stacks()
        time.sleep(STACKS_S)
        stopped = [worker for worker in running if worker.rank == rank and _is_stopped(worker)]
        if stopped:
            for worker in running:
                worker.signal_group(signal.SIGSTOP)
            stopped[0].go_on_for_stacks()
            for worker in running:
                worker.signal_group(signal.SIGKILL)


def _is_stopped(worker: Worker) -> bool:
    process = look_at(worker.process.pid)
    return process is not None and process.is_stopped


def look_at(pid: int) -> Process | None:
    """What the kernel says of a process; None if it says nothing."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return Process(fields[0], cpu_s)
    return None
