"""Reads the files that trainer.trace=true writes: instructions of all ranks, all intervals of some."""

import functools
import gzip
import json
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from siirl.observe.printable import printable
from siirl.observe.trace import TRACE_DIR, TRACE_FILE
from siirl.runs.folder_reader import (
    Skipped,
    json_objects,
    json_value,
    mapping,
    number,
    numbered,
    opened,
    whole,
    whole_lines,
)


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


MOST_RANKS, MOST_FILES, MOST_ARGS, MOST_TEXT, MOST_NAMED = 64, 16_384, 16, 200, 4
MOST_BYTES, MOST_MERGED_BYTES, MOST_EVENTS = 64 << 20, 256 << 20, 20_000
_BEGIN, _END, _WHOLE, _FIRST_LANE = b'{"ph":"B"', b'{"ph":"E"', b'{"ph":"X"', b'"tid":0,'
"""As siirl.observe.trace writes a line."""


def read_traces(output_dir: Path, skipped: Skipped) -> tuple[list[RankTrace], list[RankTrace]]:
    """(all ranks, those of them that can be shown one by one, with all of their intervals).

    Of the others only the outermost intervals are read: of thousands, that takes a tenth of the time.
    """
    files = numbered(output_dir / TRACE_DIR, "rank_", ".jsonl", skipped)
    if not files:
        traces = [_read(rank, events) for rank, events in _merged_events(output_dir / TRACE_FILE, skipped)]
        return traces, traces
    if len(files) > MOST_FILES:
        skipped.add("timeline", f"the first {MOST_FILES} of {len(files)} ranks are read")
        files = files[:MOST_FILES]
    chosen = set(range(len(files)))
    if len(files) > MOST_RANKS:
        skipped.add("timeline", f"{MOST_RANKS} of {len(files)} ranks are shown one by one, evenly chosen")
        chosen = {index * len(files) // MOST_RANKS for index in range(MOST_RANKS)}
    most, of_files, traces = MOST_BYTES // len(files), Skipped(), []
    for index, (rank, path) in enumerate(files):
        lines, cut = whole_lines(path, most, of_files)
        last_us = 0.0
        if index not in chosen:
            last_us = _moment(mapping(json_value(lines[-1]))) if lines else 0.0
            lines = outermost(lines)
        traces.append(_read(rank, json_objects(lines, path, of_files), cut, last_us))
    for what, why in list(of_files.items())[:MOST_NAMED]:
        skipped.add(what, why)
    if len(of_files) > MOST_NAMED:
        more = f"of {len(of_files) - MOST_NAMED} more ranks, too, not all is read"
        skipped.add("trace", f"{more}: the last {most >> 10} KiB of each")
    return traces, [traces[index] for index in sorted(chosen)]


def outermost(lines: Iterable[bytes]) -> list[bytes]:
    """Without the lines of intervals that lie in others, or in other lanes than that of the instructions.

    What is in a line is not parsed, but for how it begins; a line of no known kind is kept.
    """
    kept, depth = [], 0
    for line in lines:
        kind = line[: len(_BEGIN)]
        if kind == _WHOLE:
            continue
        if kind == _BEGIN:
            if _FIRST_LANE not in line:
                continue
            depth += 1
            if depth > 1:
                continue
        elif kind == _END:
            if _FIRST_LANE not in line:
                continue
            depth = max(0, depth - 1)
            if depth:
                continue
        kept.append(line)
    return kept


def _merged_events(path: Path, skipped: Skipped) -> list[tuple[int, Iterable[dict[str, Any]]]]:
    found: dict[int, deque[dict[str, Any]]] = {}
    taken = 0
    try:
        with opened(path, skipped) as packed, gzip.open(packed) as file:
            for line in file:
                taken += len(line)
                if taken > MOST_MERGED_BYTES:
                    skipped.add(path, f"only its first {MOST_MERGED_BYTES >> 20} MiB are read")
                    break
                try:
                    event = json.loads(line.strip().removesuffix(b","))
                except (ValueError, RecursionError):
                    continue  # the brackets around the events
                rank = whole(event.get("pid")) if isinstance(event, dict) else None
                if rank is not None and (rank in found or len(found) < MOST_RANKS):
                    found.setdefault(rank, deque(maxlen=MOST_EVENTS)).append(event)
    except FileNotFoundError:
        return []
    except (OSError, EOFError, zlib.error) as error:
        skipped.add(path, f"it is damaged: {type(error).__name__}")
    return sorted(found.items())


def _read(rank: int, events: Iterable[dict[str, Any]], cut: bool = False, last_us: float = 0.0) -> RankTrace:
    """Intervals of a rank by lane; ends whose beginnings lie before what was read are dropped.

    cut: there are earlier events. last_us: the moment of the last event, where not all are given.
    """
    trace = RankTrace(rank, f"rank {rank}", cut)
    stacks: dict[int, list[Interval]] = {}
    last = last_us
    for event in events:
        kind, lane, at = event.get("ph"), whole(event.get("tid", 0)), number(event.get("ts"))
        if kind == "M":
            _name(trace, event, lane)
            continue
        if lane is None or at is None:
            continue
        stack = stacks.setdefault(lane, [])
        last = max(last, at)
        if kind == "B":
            stack.append(Interval(_text(event.get("name")), at, at, len(stack), {}, True))
            trace.spans.setdefault(lane, []).append(stack[-1])
        elif kind == "E" and stack:
            span = stack.pop()
            span.end_us, span.open, span.args = max(at, span.start_us), False, _args(event)
        elif kind == "X" and (dur := number(event.get("dur"))) is not None:
            span = Interval(_text(event.get("name")), at, at + max(0.0, dur), len(stack), _args(event))
            trace.spans.setdefault(lane, []).append(span)
    for stack in stacks.values():
        for span in stack:
            span.end_us = max(span.start_us, last)
    return trace


def _moment(event: dict[str, Any]) -> float:
    return number(event.get("ts")) or 0.0


def _name(trace: RankTrace, event: dict[str, Any], lane: int | None) -> None:
    args = event.get("args")
    name = _text(args.get("name")) if isinstance(args, dict) else ""
    if event.get("name") == "process_name" and name:
        trace.label = name
    elif event.get("name") == "thread_name" and lane is not None:
        trace.lanes[lane] = name


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    if not isinstance(args, dict):
        return {}
    return {_text(key): _value(value) for key, value in list(args.items())[:MOST_ARGS]}


def _value(value: Any) -> Any:
    return value if whole(value) is not None or number(value) is not None else _text(value)


def _text(value: Any) -> str:
    return _printable(str(value)[:MOST_TEXT])


@functools.lru_cache(maxsize=4_096)  # names of a trace are few
def _printable(text: str) -> str:
    return printable(text)[:MOST_TEXT]
