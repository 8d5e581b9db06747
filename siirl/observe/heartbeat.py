"""A worker's heartbeat: once a second, from a thread of its own, where it is and since which moment.

They go to memory that the launcher shares (no disk, however busy, holds one up), a record for each rank. It
counts beats and does not read clocks, so that one that jumps, and a machine that slept, mean nothing.
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

RECORD_BYTES = 1024
EVERY_S = 1.0
FD_VARIABLE = "SIIRL_HEARTBEAT_FD"


@dataclass(frozen=True)
class Place:
    """Where a worker is."""

    order: tuple[int, ...] = ()
    """Compared between ranks: who has the smaller one is behind. All ranks go through the same places in the
    same order, each through those in which it has a part."""
    step: int = 0
    name: str = "its first imports"
    """A node id, or another part of the step; before a slash: what that is a part of."""
    times: int = 0
    """How often this rank has been in a place of this name before, and left it."""
    longest_s: float = 0.0
    """The longest of these stays."""


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a worker."""

    count: int
    """Of its beats."""
    entered: int
    """Of the places that it has entered, or was right to stay in: two beats with the same number are from one
    stay."""
    place: Place


class Heartbeat:
    """Beats for the rank of this process until it ends."""

    def __init__(self, fd: int, rank: int):
        self._fd, self._rank = fd, rank
        self._now = Beat(0, 0, Place())
        self._since_s = time.monotonic()
        self._stays: dict[str, tuple[int, float]] = {}
        self._step, self._part, self._part_name = 0, 0, ""
        self._lock = threading.Lock()
        os.set_inheritable(fd, False)
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def begin_part(self, step: int, name: str) -> None:
        """A next part of a step, which all ranks begin in the same order: a pass through the plan, a save."""
        self._part = self._part + 1 if step == self._step else 0
        self._step, self._part_name = step, name
        self._enter(name, ())

    def enter(self, name: str, order: Sequence[int]) -> None:
        """This rank goes to another place of the part. order: among the places of the part."""
        self._enter(f"{self._part_name}/{name}", order)

    def stay(self) -> None:
        """This rank is right to be where it is, however long: it waits for somebody outside of the run."""
        self._since_s = time.monotonic()
        self._beat(None, stays=True)

    def _enter(self, name: str, order: Sequence[int]) -> None:
        now_s, left = time.monotonic(), self._now.place.name
        times, longest_s = self._stays.get(left, (0, 0.0))
        self._stays[left] = (times + 1, max(longest_s, now_s - self._since_s))
        place = Place((self._step, self._part, *order), self._step, name, *self._stays.get(name, (0, 0.0)))
        self._since_s = now_s
        self._beat(place)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._beat(None)
            pause.wait(EVERY_S)

    def _beat(self, entered: Place | None, stays: bool = False) -> None:
        """Beat, at once where another place is entered: whoever holds the interpreter there is known to."""
        with self._lock:
            last = self._now
            place = entered or last.place
            self._now = Beat(last.count + 1, last.entered + (stays or entered is not None), place)
            record = (self._now.count, self._now.entered, tuple(vars(place).values()))
            text = json.dumps(record).encode()[:RECORD_BYTES]
            os.pwrite(self._fd, text.ljust(RECORD_BYTES), self._rank * RECORD_BYTES)


@contextmanager
def heartbeat_file(world_size: int) -> Iterator[int]:
    """A file without a name for the beats of some ranks, in memory where the system can; its descriptor."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("siirl_heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, world_size * RECORD_BYTES)
        yield fd
    finally:
        os.close(fd)


def read_beat(fd: int, rank: int) -> Beat | None:
    """The last beat of a rank; None before its first one, or while it is written."""
    try:
        count, entered, place = json.loads(os.pread(fd, RECORD_BYTES, rank * RECORD_BYTES).strip(b"\0 "))
        return Beat(count, entered, Place(tuple(place[0]), *place[1:]))
    except (ValueError, TypeError):
        return None


def start_heartbeat(rank: int) -> None:
    """Beat from now on, if a launcher listens."""
    global _current
    fd = os.environ.pop(FD_VARIABLE, None)
    if fd is not None:
        _current = Heartbeat(int(fd), rank)


def current_heartbeat() -> Heartbeat | None:
    """That of this process."""
    return _current


_current: Heartbeat | None = None
