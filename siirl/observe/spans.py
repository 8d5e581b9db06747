"""Wall time per instruction of the plan, and per phase inside it: what a step spent where.

The loop opens spans. Whatever runs inside one (an engine, a link, the transport) says what it is doing by
`phase` and `note`; they reach the observer of this process, and do nothing where there is none.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from siirl.observe.heartbeat import Heartbeat
from siirl.observe.memory_probe import MemoryMeter
from siirl.observe.metrics import Metrics
from siirl.observe.position import AT_END, PositionFile
from siirl.observe.trace import TraceFile


def phase(name: str, **args: Any) -> AbstractContextManager[None]:
    """Measure what runs inside as a part of the open span or phase; `args` (JSON values) go into the trace.

    From any thread. Durations become time/<span>/<name>_s, phases of one name in a span are summed. Host
    time: work queued on a GPU counts where somebody waits for it, unless trainer.trace_sync is set.
    """
    return nullcontext() if _current is None else _current.phase(name, **args)


def note(**args: Any) -> None:
    """Add args (JSON values) to the innermost open span or phase of this thread, for the trace."""
    if _current is not None:
        _current.note(**args)


def add_phase(name: str, start_s: float, end_s: float, **args: Any) -> None:
    """Book a phase that is over, in time.perf_counter's seconds: for work that another process reports."""
    if _current is not None:
        _current.add_phase(name, start_s, end_s, **args)


def waits_outside(who: str) -> None:
    """Say that this rank stays where it is for somebody outside of the run, and for whom; "" for nobody.

    From any thread. Whoever watches the rank does not take it to be stuck: a wait has a bound of its own.
    """
    if _current is not None:
        _current.waits_outside(who)


@contextmanager
def waiting() -> Iterator[None]:
    """What runs inside waits for other ranks: perf/idle_s counts it. In the thread of the loop; not nested.

    Host time, so a collective on the device's stream counts where somebody waits for it.
    """
    start_s = time.perf_counter()
    try:
        yield
    finally:
        if _current is not None:
            _current.count_idle(time.perf_counter() - start_s)


@contextmanager
def observing(observer: "Observer") -> Iterator[None]:
    """Make `observer` the one that phase, note and add_phase reach, in all threads of this process."""
    global _current
    before, _current = _current, observer
    try:
        yield
    finally:
        _current = before


@dataclass(frozen=True)
class Span:
    """One measured stretch."""

    name: str
    """A node id or e.g. "reshard"; of a phase: the span and the phases around it too, joined by "/"."""
    start_s: float
    """Of time.perf_counter."""
    duration_s: float
    depth: int
    """0: not inside another span."""


class Profile(Protocol):
    """What else records a step, beside spans: of the thread that opens them (siirl/observe/profile.py)."""

    def begin_step(self, step: int) -> None: ...

    def recorded(self, name: str, node: str | None) -> AbstractContextManager[None]:
        """Around a span. node: that it serves, if it is no node itself."""
        ...

    def range(self, name: str) -> AbstractContextManager[Any]:
        """In a span or phase."""
        ...

    def end_step(self) -> None: ...


@dataclass
class _Open:
    """A span or phase that has begun."""

    path: str
    """As Span.name."""
    args: dict[str, Any]


class Observer:
    """Measures the spans of one rank's steps; a few microseconds a span. No communication.

    position: also record where this rank is, for whoever has to explain its death; heartbeat: for whoever
    watches it. sync: called before each
    clock reading of a span (torch.cuda.synchronize), to attribute device time to the node that queued the
    work; None: do not wait. sync_phases: the same for phases. trace: also write them there. memory: measure
    the memory peak of each outermost span. profile: record what runs inside. `spans` holds those of the
    current step, in order of their ends.
    """

    def __init__(
        self,
        position: PositionFile | None = None,
        sync: Callable[[], None] | None = None,
        trace: TraceFile | None = None,
        memory: MemoryMeter | None = None,
        sync_phases: bool = False,
        heartbeat: Heartbeat | None = None,
        profile: Profile | None = None,
    ):
        self.spans: list[Span] = []
        self._position, self._sync, self._trace, self._memory = position, sync, trace, memory
        self._phase_sync = sync if sync_phases else None
        self._heartbeat, self._profile = heartbeat, profile
        self._owner = threading.get_ident()
        self._stacks: dict[int, list[_Open]] = {self._owner: []}
        self._step = 0
        self._part, self._part_step, self._part_name = 0, 0, ""
        self._idle_s = 0.0
        self._step_start_s = time.perf_counter()

    def begin_step(self, step: int = 0) -> None:
        """Start the clock of a step and forget the spans of the last one."""
        self.spans = []
        if self._profile is not None:
            self._profile.begin_step(step)
        if self._memory is not None:
            self._memory.begin_step()
        if self._trace is not None:
            self._trace.begin_step()
        self._step_start_s = self._now(self._sync)

    def end_step(self) -> None:
        """Write what was recorded of the step besides its metrics; after them, as it takes time."""
        if self._profile is not None:
            self._profile.end_step()

    @contextmanager
    def part(self, name: str, step: int) -> Iterator[None]:
        """Say that this rank begins a part of the run, and that it ended it; all do in the same order."""
        self._begin_part(step, name)
        yield
        self._begin_part(step, f"after {name}")
        if self._position is not None:
            self._position.set(step, f"end of {name}", AT_END, (self._part,))

    def _begin_part(self, step: int, name: str) -> None:
        self._part = self._part + 1 if step == self._part_step else 0
        self._part_step, self._part_name = step, name
        if self._heartbeat is not None:
            self._heartbeat.begin_part(step, name)

    @contextmanager
    def span(self, name: str, step: int, order: Sequence[int] = (), **args: Any) -> Iterator[None]:
        """Measure what runs inside, under `name` (a node id, or e.g. "reshard"); spans may nest.

        order: of an instruction, among those of its pass through the plan; empty: this is a part of its own.
        """
        if order and self._heartbeat is not None:
            self._heartbeat.enter(name, order)
        self._step = step
        memory = None if self._stacks[self._owner] else self._memory
        if memory is not None:
            memory.begin()
        part = nullcontext() if order else self.part(name, step)
        with part, self._recorded(name, args.get("node")):
            if self._position is not None:
                self._position.set(step, name, self._part_name, (self._part, *order))
            with self._measure(name, name, self._sync, args | {"step": step}):
                yield
                if memory is not None:
                    self.note(**memory.end(name, self._trace is not None and self._trace.wants(step)))

    def phase(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """See the function `phase`."""
        return self._measure(name, self._path(name), self._phase_sync, args)

    def note(self, **args: Any) -> None:
        """See the function `note`."""
        if stack := self._stacks.get(threading.get_ident()):
            stack[-1].args.update(args)

    def add_phase(self, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """See the function `add_phase`."""
        ident = threading.get_ident()
        stack = self._stacks.get(ident, [])
        if ident == self._owner:
            self.spans.append(Span(self._path(name), start_s, end_s - start_s, len(stack)))
        if self._trace is not None and self._trace.wants(self._step):
            self._trace.complete(name, start_s, end_s, args)

    def waits_outside(self, who: str) -> None:
        """See the function `waits_outside`."""
        if self._heartbeat is not None:
            self._heartbeat.stay()
        if self._position is not None:
            self._position.wait(who)

    def count_idle(self, seconds: float) -> None:
        """Add time of waiting for other ranks; that of other threads is none of the loop's."""
        if threading.get_ident() == self._owner:
            self._idle_s += seconds

    @property
    def idle_s(self) -> float:
        """How long this rank has waited for others since the last `drain_idle`."""
        return self._idle_s

    def drain_idle(self, metrics: Metrics) -> None:
        """Add how long this rank has waited for others since the last call."""
        metrics.mean("perf/idle_s", self._idle_s)
        metrics.max("perf/idle_s_max", self._idle_s)
        self._idle_s = 0.0

    def metrics(self) -> Metrics:
        """time/<name>_s of this step, time/step_s, and time/overhead_s: the part of it outside of all spans.

        And the memory peaks. Over ranks the largest counts. A name that ran several times is summed.
        """
        step_s = self._now(self._sync) - self._step_start_s
        by_name: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda span: span.start_s):
            by_name[span.name] = by_name.get(span.name, 0.0) + span.duration_s
        covered_s = sum(span.duration_s for span in self.spans if span.depth == 0)
        out = Metrics()
        for name, seconds in by_name.items():
            out.max(f"time/{name}_s", seconds)
        out.max("time/step_s", step_s)
        out.max("time/overhead_s", step_s - covered_s)
        if self._memory is not None:
            out.merge(self._memory.metrics())
        return out

    def sample_memory(self) -> None:
        """Look at the device now: between spans' ends, when another process holds most of it."""
        if self._memory is not None:
            self._memory.sample()

    def close(self) -> None:
        """Release the files. Phases that still end afterwards are not traced."""
        trace, self._trace = self._trace, None
        for file in (trace, self._position):
            if file is not None:
                file.close()
        self._position = None

    @contextmanager
    def _measure(
        self, name: str, path: str, sync: Callable[[], None] | None, args: dict[str, Any]
    ) -> Iterator[None]:
        ident = threading.get_ident()
        stack = self._stacks.setdefault(ident, [])
        start_s = self._now(sync)
        trace = self._trace if self._trace is not None and self._trace.wants(self._step) else None
        if trace is not None:
            trace.begin(name, start_s)
        stack.append(_Open(path, args))
        ranges = self._profile if ident == self._owner else None
        try:
            with _NOTHING if ranges is None else ranges.range(name):
                yield
        finally:
            end_s = self._now(sync)
            stack.pop()
            if ident == self._owner:
                self.spans.append(Span(path, start_s, end_s - start_s, len(stack)))
            if trace is not None:
                trace.end(end_s, args)

    def _recorded(self, name: str, node: str | None) -> AbstractContextManager[None]:
        return _NOTHING if self._profile is None else self._profile.recorded(name, node)

    def _path(self, name: str) -> str:
        stack = self._stacks.get(threading.get_ident())
        return f"{stack[-1].path}/{name}" if stack else name

    def _now(self, sync: Callable[[], None] | None) -> float:
        if sync is not None:
            sync()
        return time.perf_counter()


_current: Observer | None = None
_NOTHING = nullcontext()
