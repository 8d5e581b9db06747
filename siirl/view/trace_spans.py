"""Intervals of a traced rank."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from siirl.runs.folder_reader import whole


@dataclass(slots=True)
class Interval:
    """A stretch of a rank's time."""

    name: str
    start_us: float
    end_us: float
    """The end of what is on record, of one that is open."""
    depth: int
    args: dict[str, Any]
    open: bool = False

    @property
    def met(self) -> tuple[str, str]:
        """What an instruction has in common on all ranks that run it together."""
        return self.name, str(self.args.get("route") or self.args.get("link") or "")

    def row(self, start_us: float) -> list[Any]:
        """[name, start, duration, depth, whether it never ended, args]; milliseconds"""
        begin, duration = milliseconds(self.start_us, start_us), milliseconds(self.end_us, self.start_us)
        return [self.name, begin, duration, self.depth, int(self.open), self.args]


@dataclass
class RankTrace:
    """What is known of a rank."""

    rank: int
    label: str
    cut: bool = False
    """Whether its file has earlier events, which were not read."""
    lanes: dict[int, str] = field(default_factory=dict)
    """Lane -> the name of its thread; 0 is that of the instructions."""
    spans: dict[int, list[Interval]] = field(default_factory=dict)
    """By lane, in the order of their beginnings."""

    @cached_property
    def _by_step(self) -> dict[int, list[Interval]]:
        found: dict[int, list[Interval]] = {}
        for span in self.spans.get(0, []):
            if span.depth == 0 and (step := whole(span.args.get("step"))) is not None:
                found.setdefault(step, []).append(span)
        return found

    @property
    def begun_before(self) -> int:
        """The step whose beginning was not read; -1 where all was."""
        return next(iter(self._by_step), -1) if self.cut else -1

    def instructions(self, step: int) -> list[Interval]:
        """The outermost intervals of a step."""
        return self._by_step.get(step, [])

    @cached_property
    def steps(self) -> dict[int, tuple[float, float]]:
        """Step -> when it began and ended here."""
        return {
            step: (min(span.start_us for span in spans), max(span.end_us for span in spans))
            for step, spans in self._by_step.items()
        }


def milliseconds(at_us: float, start_us: float) -> float:
    """Since the start, as the page has it."""
    return round((at_us - start_us) / 1e3, 3)
