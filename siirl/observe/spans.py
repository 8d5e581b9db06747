"""Wall time per instruction of the plan: what a step spent where, and what the engine itself cost."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from siirl.observe.metrics import Metrics
from siirl.observe.position import PositionFile


@dataclass(frozen=True)
class Span:
    """One measured stretch. start_s: of time.perf_counter; depth 0: not inside another span."""

    name: str
    start_s: float
    duration_s: float
    depth: int


class Observer:
    """Measures the spans of one rank's steps; about 3 microseconds a span. No communication.

    position: also record where this rank is, for whoever has to explain its death. sync: called before each
    clock reading (torch.cuda.synchronize), to attribute device time to the node that queued the work; None:
    do not wait. `spans` holds those of the current step, in order of their ends.
    """

    def __init__(self, position: PositionFile | None = None, sync: Callable[[], None] | None = None):
        self.spans: list[Span] = []
        self._position = position
        self._sync = sync
        self._depth = 0
        self._step_start_s = time.perf_counter()

    def begin_step(self) -> None:
        """Start the clock of a step and forget the spans of the last one."""
        self.spans = []
        self._step_start_s = self._now()

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        """Measure what runs inside, under `name` (a node id, or e.g. "reshard"); spans may nest."""
        if self._position is not None:
            self._position.set(step, name)
        depth, self._depth = self._depth, self._depth + 1
        start_s = self._now()
        try:
            yield
        finally:
            self.spans.append(Span(name, start_s, self._now() - start_s, depth))
            self._depth = depth

    def metrics(self) -> Metrics:
        """time/<name>_s of this step, time/step_s, and time/overhead_s: the part of it outside of all spans.

        Over ranks the largest counts. A name that ran several times is summed.
        """
        step_s = self._now() - self._step_start_s
        by_name: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda span: span.start_s):
            by_name[span.name] = by_name.get(span.name, 0.0) + span.duration_s
        covered_s = sum(span.duration_s for span in self.spans if span.depth == 0)
        out = Metrics()
        for name, seconds in by_name.items():
            out.max(f"time/{name}_s", seconds)
        out.max("time/step_s", step_s)
        out.max("time/overhead_s", step_s - covered_s)
        return out

    def _now(self) -> float:
        if self._sync is not None:
            self._sync()
        return time.perf_counter()
