"""Between the server and the worker: commands in order, and their answers until they are read.

consumes: commands of the server's thread. produces: their answers. waits for: nothing on the server's
side; `take`, on the thread that speaks for the worker, for the next command. unblocked by: `submit`, a time,
`close`.

Commands of one lane, a training client, run in the order of their numbers from 1 on, whenever they come: a
large request comes in parts, the first of them last. Samples have a lane for each sampling session, in the
order in which they come. A number that comes again is the same request: it gets the same answer, and nothing
runs twice.

Lanes belong to tenants. The next command is one of the tenant that has had the fewest tokens, counted from
when it began to ask: a flood of one costs another one command (start-time fair queueing: Goyal, Vin and
Cheng, 1996). Lanes of one tenant take turns. A tenant has bounds of its own on what waits, what is kept, and
tokens a second; beyond them it is told to come back.

Clients who wait for each answer before they ask again have nothing waiting when it comes. Who usually comes
back sooner than a pass takes is waited for, so that a pass has all of them, and one who floods gets no turn
of theirs (anticipatory scheduling: Iyer and Druschel, 2001).
"""

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from siirl.service.commands import Command, ForwardBackward, OptimStep, Refused, Sample, num_tokens

MOST_KEPT_BYTES = 1 << 30
"""When all answers are larger than this, the oldest of the tenant with most are forgotten."""
MOST_TOGETHER = 64
"""Commands that are carried out together at most, where nothing else says how many."""
MOST_WAITING = 4096
"""Commands of a tenant that wait: one who floods has to come back."""
MOST_WAITING_BYTES = 256 << 20
"""Of the requests of a tenant that wait."""
BURST_S = 10.0
"""A tenant that was silent may ask for the tokens of so many seconds at once."""
LATER_S = 1.0
PATIENCE = 4.0
"""Who was answered is waited for, so many times as long as it usually takes to ask again."""
RECENT = 4.0 * PATIENCE
"""And for so long no other tenant has more than one command in a pass."""
MOST_AWAY_S = 0.5
"""Who usually takes longer to ask again is not waited for, nor who takes longer than two passes."""
LONG_S = RECENT * MOST_AWAY_S
NEW_SHARE = 0.3
"""Of what was measured last in the mean of how long clients take to ask again."""


class ComeBack(Exception):
    """A tenant asks for more than it may have now."""

    def __init__(self, text: str, wait_s: float = LATER_S) -> None:
        super().__init__(text)
        self.wait_s = wait_s


@dataclass
class Ticket:
    """A command, and in time its answer."""

    id: str
    command: Command | Refused | None
    """Refused: a request that has its number, and cannot be run. None when it is done: its data are large."""
    lane: str
    tenant: str = ""
    answer: Any = None
    """What the server sends: bytes or a JSON object; a Refused; or another Exception, which is ours."""
    is_done: bool = False
    num_bytes: int = 0
    """Of the request while it waits, of the answer then."""
    charged: int = 0
    """Tokens that its tenant was charged for."""
    told: list[Callable[[], object]] = field(default_factory=list)
    """Called when it is done, on the worker's thread."""


Answered = tuple[Ticket, Any, int | None]
"""A ticket, its answer, and the tokens that it took; None: those that it asked for."""


@dataclass
class Tenant:
    """What one who shares the service has had, and has waiting."""

    tokens: int = 0
    """Trained, read and sampled."""
    num_waiting: int = 0
    waiting_bytes: int = 0
    kept_bytes: int = 0
    served: float = 0.0
    """Tokens, counted from where the others were when it began to ask."""
    credit: float = 0.0
    """Tokens that it may ask for; below 0 it has had them already."""
    credited_s: float = 0.0
    lanes: deque[str] = field(default_factory=deque)


@dataclass
class _Lane:
    tenant: str
    number: int | None
    """Of the next command; None: any order will do."""
    waiting: dict[Hashable, Ticket] = field(default_factory=dict)
    answered_s: float = 0.0
    """When all that it had asked for was answered."""
    away_s: float | None = None
    """How long it usually takes then until it asks again; None: it never has."""

    def first(self) -> Ticket | None:
        """The next command, if it has come."""
        return self.waiting.get(next(iter(self.waiting), None) if self.number is None else self.number)

    def pop(self) -> Ticket | None:
        """The next command, if it has come, which is then gone from here."""
        if (ticket := self.first()) is not None:
            del self.waiting[next(iter(self.waiting)) if self.number is None else self.number]
            self.number = None if self.number is None else self.number + 1
        return ticket


class Desk:
    """For two threads."""

    def __init__(self, max_tokens_per_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """max_tokens_per_s: of each tenant; 0: any number."""
        self.is_closed = False
        self.alone: Container[str] = ()
        """Ids of requests that are carried out by themselves."""
        self._rate, self._clock = max_tokens_per_s, clock
        self._lock = threading.Condition()
        self._own: deque[Ticket] = deque()
        self._lanes: dict[str, _Lane] = {}
        self._tenants: dict[str, Tenant] = {}
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self._now = 0.0
        """What the tenant that was served last had been served."""
        self._away: set[str] = set()
        """Lanes that have been answered, and may soon ask again."""
        self._taken_s = self._pass_s = 0.0
        """When the last command was taken, and how long those take that have tokens."""

    def open_lane(self, lane: str, number: int | None, tenant: str = "") -> None:
        """A lane of a tenant, whose first command has this number. Idempotent."""
        with self._lock:
            if lane not in self._lanes:
                self._lanes[lane] = _Lane(tenant, number)
                full = self._rate * BURST_S
                who = self._tenants.setdefault(tenant, Tenant(credit=full, credited_s=self._clock()))
                who.lanes.append(lane)

    def restore(self, lane: str, number: int, tenant: str, answers: Sequence[tuple[int, Any]]) -> None:
        """A lane of an earlier server: the number of its next command, and what others were answered. To be
        started again gives its tenant no tokens."""
        self.open_lane(lane, number, tenant)
        self._tenants[tenant].credit = 0.0
        for of, answer in answers:
            with self._lock:
                self._tickets[f"{lane}:{of}"] = ticket = Ticket(f"{lane}:{of}", None, lane, tenant)
                self._finish(ticket, answer)

    def close_lanes(self, prefix: str) -> None:
        """Forget the lanes of a session that is over; what waits in them is refused."""
        with self._lock:
            waiting: list[Ticket] = []
            for lane in [lane for lane in self._lanes if lane.startswith(prefix)]:
                here = self._lanes.pop(lane)
                self._away.discard(lane)
                self._tenants[here.tenant].lanes.remove(lane)
                waiting += here.waiting.values()
            for ticket in waiting:
                self._left(ticket)
                self._finish(ticket, Refused("the session is over"))
            for id in [id for id in self._tickets if id.startswith(prefix)]:
                self._forget(id)

    def forget(self, tenant: str) -> None:
        """One that has no lanes any more, and does not come again."""
        with self._lock:
            self._tenants.pop(tenant, None)

    def has_lane(self, lane: str) -> bool:
        return lane in self._lanes

    def tenants(self) -> dict[str, Tenant]:
        """By name."""
        with self._lock:
            return dict(self._tenants)

    def submit(
        self, lane: str, number: int, make: Callable[[], Command], num_bytes: int = 0, is_new: bool = True
    ) -> Ticket:
        """The ticket of a command with this number, new or old. ComeBack; KeyError without such a lane.

        make: gives the command, for a number that is new; Refused is an answer, as the number counts.
        num_bytes: of the request. is_new: not if an earlier server has accepted it: it is within all bounds.
        """
        id = f"{lane}:{number}"
        with self._lock:
            if id in self._tickets:
                return self._tickets[id]
            here = self._lanes[lane]
            if here.number is not None and number < here.number:
                raise KeyError(id)
            tenant = self._tenants[here.tenant]
            if is_new:
                self._admit(tenant, num_bytes)
            try:
                ticket = Ticket(id, make(), lane, here.tenant, num_bytes=num_bytes)
            except Refused as error:
                ticket = Ticket(id, error, lane, here.tenant, num_bytes=num_bytes)
            else:
                ticket.charged = num_tokens(ticket.command)  # type: ignore[arg-type]
            if not tenant.num_waiting:
                tenant.served = max(tenant.served, self._now)
            if lane in self._away:
                self._away.remove(lane)
                took_s = min(self._clock() - here.answered_s, MOST_AWAY_S)  # a pause is soon forgotten
                usual_s = took_s if here.away_s is None else here.away_s
                here.away_s = usual_s + NEW_SHARE * (took_s - usual_s)
            self._tickets[id] = here.waiting[number] = ticket
            tenant.credit -= ticket.charged
            tenant.num_waiting += 1
            tenant.waiting_bytes += num_bytes
            self._lock.notify()
            return ticket

    def _admit(self, tenant: Tenant, num_bytes: int) -> None:
        if tenant.num_waiting >= MOST_WAITING:
            raise ComeBack(f"{MOST_WAITING} requests of this tenant wait")
        if tenant.num_waiting and tenant.waiting_bytes + num_bytes > MOST_WAITING_BYTES:
            raise ComeBack(f"{MOST_WAITING_BYTES >> 20} MiB of requests of this tenant wait")
        if self._rate:
            now_s = self._clock()
            earned = self._rate * (now_s - tenant.credited_s)
            tenant.credit, tenant.credited_s = min(tenant.credit + earned, self._rate * BURST_S), now_s
            if tenant.credit <= 0:
                wait_s = 1 - tenant.credit / self._rate
                raise ComeBack(
                    f"this tenant has had its {self._rate:g} tokens a second (service.max_tokens_per_s): "
                    f"come back in {wait_s:.0f} s",
                    wait_s,
                )

    def submit_own(self, command: Command) -> None:
        """A command of the server itself, before all others."""
        with self._lock:
            self._own.append(Ticket("", command, ""))
            self._lock.notify()

    def ticket(self, id: str) -> Ticket | None:
        """None if there is none, or none any more."""
        with self._lock:
            return self._tickets.get(id)

    def is_answered(self, id: str) -> bool:
        """Also if the answer was forgotten."""
        return (ticket := self.ticket(id)) is None or ticket.is_done

    def take(self, timeout_s: float) -> Ticket | None:
        """The next command, of the tenant whose turn it is, when those have come who are waited for; None if
        that is not in time, or when closed."""
        with self._lock:
            end_s = time.monotonic() + timeout_s
            while True:
                wait_s = 0.0 if self.is_closed else self._wait_s()
                found = self._next() if wait_s <= 0 else None
                left_s = end_s - time.monotonic()
                if found is not None or self.is_closed or left_s <= 0:
                    self._taken_s = self._clock()
                    return found
                self._lock.wait(min(wait_s, left_s) if wait_s > 0 else left_s)

    def _wait_s(self) -> float:
        """How long the next command has to wait for others; without an end where there is none."""
        if self._own:
            return 0.0
        if not any(one.num_waiting for one in self._tenants.values()):
            return math.inf
        now_s = self._clock()
        left_s = {lane: self._back_s(lane, PATIENCE) - now_s for lane in self._soon(PATIENCE)}
        active = {self._lanes[lane].tenant for lane in left_s}
        active |= {name for name, one in self._tenants.items() if one.num_waiting}
        if len(active) == 1 and self._are_samples(next(iter(active))):
            return 0.0  # nobody else has a share, and no training pass would have them
        if len(active) > 1:  # a tenant that asks has its share of the pass, with all of its lanes or some
            left_s = {
                lane: one
                for lane, one in left_s.items()
                if not self._tenants[self._lanes[lane].tenant].num_waiting
            }
        return max(left_s.values(), default=0.0)

    def _are_samples(self, tenant: str) -> bool:
        """Whether all that it asks for next are samples."""
        firsts = (self._lanes[lane].first() for lane in self._tenants[tenant].lanes)
        return all(isinstance(one.command, Sample) for one in firsts if one is not None)

    def _back_s(self, lane: str, times: float) -> float:
        """When it will have asked again, if it does not take so many times as long as usually."""
        here = self._lanes[lane]
        return here.answered_s + times * (here.away_s or 0.0)

    def _soon(self, times: float) -> list[str]:
        """Lanes that are likely to ask again soon."""
        now_s, most_s = self._clock(), min(MOST_AWAY_S, 2 * self._pass_s)
        self._away = {lane for lane in self._away if now_s - self._lanes[lane].answered_s < LONG_S}
        return [
            lane
            for lane in self._away
            if (self._lanes[lane].away_s or math.inf) < most_s and self._back_s(lane, times) > now_s
        ]

    def take_together(self, timeout_s: float, most_samples: int) -> list[Ticket]:
        """What is carried out next: a command as `take` gives it, and others that go with it; none if none
        is there in time. most_samples: of one source, which are decoded together."""
        if (ticket := self.take(timeout_s)) is None:
            return []
        first = ticket.command
        if ticket.id in self.alone:
            return [ticket]
        if isinstance(first, Sample):
            return self.take_like(
                ticket, lambda other: isinstance(other, Sample) and other.source == first.source, most_samples
            )
        if isinstance(first, ForwardBackward):
            only = first.forward_only
            return self.take_like(
                ticket, lambda other: isinstance(other, ForwardBackward) and other.forward_only == only
            )
        if isinstance(first, OptimStep):
            return self.take_like(ticket, lambda other: isinstance(other, OptimStep))
        return [ticket]

    def take_like(
        self, ticket: Ticket, like: Callable[[Command | Refused | None], bool], most: int = MOST_TOGETHER
    ) -> list[Ticket]:
        """This and others that go with it, of each training client the next one, of samplers all that are.

        Of training passes each tenant has one, and more as long as it has fewest tokens in this pass: more
        models are no larger share of it.
        """
        found, taken, shares = [ticket], {ticket.lane}, dict[str, int]()

        def add(name: str) -> bool:
            """One more of a tenant, if it has one."""
            if len(found) >= most or (other := self._pop_like(name, like, taken)) is None:
                return False
            found.append(other)
            taken.add(other.lane)
            shares[name] = shares.get(name, 0) + max(1, other.charged)
            return True

        with self._lock:
            names = sorted(self._tenants, key=lambda name: self._tenants[name].served)
            if not isinstance(ticket.command, ForwardBackward):
                while any([add(name) for name in names]):
                    pass
                return found
            shares = {self._lanes[lane].tenant: 0 for lane in self._soon(RECENT)}
            shares[ticket.tenant] = max(1, ticket.charged)
            for name in names:
                if name != ticket.tenant:
                    add(name)
            while add(min(shares, key=lambda name: (shares[name], self._num_waiting(name)))):
                pass
        return found

    def _num_waiting(self, tenant: str) -> int:
        return self._tenants[tenant].num_waiting if tenant in self._tenants else 0

    def _pop_like(
        self, name: str, like: Callable[[Command | Refused | None], bool], taken: set[str]
    ) -> Ticket | None:
        """The next command of one of a tenant's lanes; None if it has none, or is gone."""
        tenant = self._tenants.get(name)
        for _ in range(len(tenant.lanes) if tenant is not None and tenant.num_waiting else 0):
            assert tenant is not None
            tenant.lanes.rotate(-1)
            lane = self._lanes[of := tenant.lanes[-1]]
            first = lane.first()
            if first is None or first.id in self.alone or (lane.number is not None and of in taken):
                continue
            if like(first.command):
                return self._pop(tenant, lane)
        return None

    def _next(self) -> Ticket | None:
        if self._own:
            return self._own.popleft()
        for tenant in sorted(self._tenants.values(), key=lambda one: one.served):
            for _ in range(len(tenant.lanes) if tenant.num_waiting else 0):
                tenant.lanes.rotate(-1)
                lane = self._lanes[tenant.lanes[-1]]
                ticket = self._pop(tenant, lane)
                while ticket is not None and isinstance(ticket.command, Refused):
                    self._finish(ticket, ticket.command)
                    ticket = self._pop(tenant, lane)
                if ticket is not None:
                    return ticket
        return None

    def _pop(self, tenant: Tenant, lane: _Lane) -> Ticket | None:
        ticket = lane.pop()
        if ticket is not None:
            self._left(ticket)
            self._now = max(self._now, tenant.served)
            tenant.served += ticket.charged + 1
            tenant.tokens += ticket.charged
        return ticket

    def _left(self, ticket: Ticket) -> None:
        """A ticket waits no more."""
        who = self._tenants[ticket.tenant]
        who.num_waiting -= 1
        who.waiting_bytes -= ticket.num_bytes

    def answer(self, answers: Sequence[Answered]) -> None:
        """Those of commands that were carried out together."""
        for ticket, answer, tokens in answers:
            self.done(ticket, answer, tokens)

    def done(self, ticket: Ticket, answer: Any, tokens: int | None = None) -> None:
        """Answer a command. tokens: those that it took, if they are not the ones that it asked for."""
        with self._lock:
            tenant, lane, now_s = (
                self._tenants.get(ticket.tenant),
                self._lanes.get(ticket.lane),
                self._clock(),
            )
            if ticket.charged:
                self._pass_s = max(now_s - self._taken_s, (1 - NEW_SHARE) * self._pass_s)
            if lane is not None and not lane.waiting:
                lane.answered_s = now_s
                self._away.add(ticket.lane)
            if tokens is not None and tenant is not None:
                less = ticket.charged - tokens
                tenant.served -= less
                tenant.tokens -= less
                tenant.credit += less
            self._finish(ticket, answer)

    def _finish(self, ticket: Ticket, answer: Any) -> None:
        ticket.answer, ticket.is_done, ticket.command = answer, True, None
        ticket.num_bytes = len(answer) if isinstance(answer, bytes) else 1024
        if (tenant := self._tenants.get(ticket.tenant)) is not None and ticket.id in self._tickets:
            tenant.kept_bytes += ticket.num_bytes
        while sum(one.kept_bytes for one in self._tenants.values()) > MOST_KEPT_BYTES:
            most = max(self._tenants, key=lambda name: self._tenants[name].kept_bytes)
            done = (id for id, one in self._tickets.items() if one.is_done and one.tenant == most)
            self._forget(next(done))
        told, ticket.told = ticket.told, []
        for tell in told:
            tell()

    def _forget(self, id: str) -> None:
        ticket = self._tickets.pop(id)
        if ticket.is_done and (tenant := self._tenants.get(ticket.tenant)) is not None:
            tenant.kept_bytes -= ticket.num_bytes

    def when_done(self, ticket: Ticket, tell: Callable[[], object]) -> None:
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
