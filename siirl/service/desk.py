"""Between the server's thread and the worker's: commands in order, and their answers until they are read.

consumes: commands of the server's thread. produces: their answers. waits for: nothing on the server's
side; `take` on the worker's for the next command. unblocked by: `submit`, a time, `close`.

Commands of one lane, a training client, run in the order of their numbers from 1 on, whenever they come: a
large request comes in parts, the first of them last. Lanes take turns. Samples have a lane for each sampling
session, in the order in which they come. A number that comes again is the same request: it gets the same
answer, and nothing runs twice.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from siirl.service.commands import Command, Refused

MOST_KEPT_BYTES = 1 << 30
"""When all answers are larger than this, the oldest are forgotten."""
MOST_WAITING = 4096
"""Commands of a lane that wait: one who floods has to come back."""


class LaneFull(Exception):
    """Too many commands of one client wait."""


@dataclass
class Ticket:
    """A command, and in time its answer."""

    id: str
    command: Command | Refused | None
    """Refused: a request that has its number, and cannot be run. None when it is done: its data are large."""
    lane: str
    answer: Any = None
    """What the server sends: bytes or a JSON object; a Refused; or another Exception, which is ours."""
    is_done: bool = False
    num_bytes: int = 0
    told: list[Callable[[], None]] = field(default_factory=list)
    """Called when it is done, on the worker's thread."""


@dataclass
class _Lane:
    number: int | None
    """Of the next command; None: any order will do."""
    waiting: dict[Hashable, Ticket] = field(default_factory=dict)

    def pop(self) -> Ticket | None:
        """The next command, if it has come."""
        if self.number is None:
            return self.waiting.pop(next(iter(self.waiting))) if self.waiting else None
        ticket = self.waiting.pop(self.number, None)
        self.number += ticket is not None
        return ticket


class Desk:
    """For two threads."""

    def __init__(self) -> None:
        self.is_closed = False
        self._lock = threading.Condition()
        self._lanes: dict[str, _Lane] = {}
        self._turns: deque[str] = deque()
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self._kept_bytes = 0

    def open_lane(self, lane: str, number: int | None) -> None:
        """A lane, whose first command has this number. Idempotent."""
        with self._lock:
            if lane not in self._lanes:
                self._lanes[lane] = _Lane(number)
                self._turns.append(lane)

    def close_lanes(self, prefix: str) -> None:
        """Forget the lanes of a session that is over; what waits in them is refused."""
        with self._lock:
            gone = [lane for lane in self._lanes if lane.startswith(prefix)]
            tickets = [one for lane in gone for one in self._lanes.pop(lane).waiting.values()]
            self._turns = deque(lane for lane in self._turns if lane in self._lanes)
        for ticket in tickets:
            self.done(ticket, Refused("the session is over"))

    def has_lane(self, lane: str) -> bool:
        return lane in self._lanes

    def submit(self, lane: str, number: int, make: Callable[[], Command]) -> Ticket:
        """The ticket of a command with this number, new or old. LaneFull; KeyError without such a lane.

        make: gives the command, for a number that is new; Refused is an answer, as the number counts.
        """
        id = f"{lane}:{number}"
        with self._lock:
            if id in self._tickets:
                return self._tickets[id]
            here = self._lanes[lane]
            if here.number is not None and number < here.number:
                raise KeyError(id)
            if len(here.waiting) >= MOST_WAITING:
                raise LaneFull(f"{MOST_WAITING} requests of this client wait")
            try:
                ticket = Ticket(id, make(), lane)
            except Refused as error:
                ticket = Ticket(id, error, lane)
            self._tickets[id] = here.waiting[number] = ticket
            self._lock.notify()
            return ticket

    def submit_own(self, command: Command) -> None:
        """A command of the server itself, before all others."""
        with self._lock:
            lane = self._lanes.setdefault("", _Lane(None))
            lane.waiting[len(self._tickets), id(command)] = Ticket("", command, "")
            if "" not in self._turns:
                self._turns.appendleft("")
            self._lock.notify()

    def ticket(self, id: str) -> Ticket | None:
        """None if there is none, or none any more."""
        with self._lock:
            return self._tickets.get(id)

    def take(self, timeout_s: float) -> Ticket | None:
        """The next command, of the lane whose turn it is; None if none comes in time, or when closed."""
        with self._lock:
            found = self._next()
            if found is None and not self.is_closed:
                self._lock.wait(timeout_s)
                found = self._next()
            return found

    def take_like(
        self, ticket: Ticket, like: Callable[[Command | Refused | None], bool], most: int
    ) -> list[Ticket]:
        """Commands that are next in their lanes, and go with this one."""
        found = [ticket]
        with self._lock:
            for lane in self._lanes.values():
                while len(found) < most and lane.number is None and lane.waiting:
                    if not like(lane.waiting[next(iter(lane.waiting))].command):
                        break
                    found.append(lane.pop())
        return found

    def _next(self) -> Ticket | None:
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            ticket = self._lanes[self._turns[-1]].pop()
            while ticket is not None and isinstance(ticket.command, Refused):
                self._finish(ticket, ticket.command)
                ticket = self._lanes[self._turns[-1]].pop()
            if ticket is not None:
                return ticket
        return None

    def done(self, ticket: Ticket, answer: Any) -> None:
        """Answer a command."""
        with self._lock:
            self._finish(ticket, answer)

    def _finish(self, ticket: Ticket, answer: Any) -> None:
        ticket.answer, ticket.is_done, ticket.command = answer, True, None
        ticket.num_bytes = len(answer) if isinstance(answer, bytes) else 1024
        self._kept_bytes += ticket.num_bytes
        while self._kept_bytes > MOST_KEPT_BYTES:
            oldest = next((id for id, one in self._tickets.items() if one.is_done), None)
            if oldest is None:
                break
            self._kept_bytes -= self._tickets.pop(oldest).num_bytes
        told, ticket.told = ticket.told, []
        for tell in told:
            tell()

    def when_done(self, ticket: Ticket, tell: Callable[[], None]) -> None:
        """Have this called when there is an answer, or at once if there is one."""
        with self._lock:
            if not ticket.is_done:
                ticket.told.append(tell)
                return
        tell()

    def close(self) -> None:
        """Wake whoever waits in `take`: nothing comes any more."""
        with self._lock:
            self.is_closed = True
            self._lock.notify_all()
