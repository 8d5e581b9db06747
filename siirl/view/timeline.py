"""What each rank did in the last traced steps, from the files that trainer.trace=true writes."""

import gzip
import json
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.observe.printable import printable
from siirl.observe.trace import TRACE_DIR, TRACE_FILE
from siirl.runs.folder_reader import LeftOut, json_lines, number, numbered, whole
from siirl.view.critical_path import OUTSIDE, Part, bounds, meeting_names
from siirl.view.step_edges import step_edges

LAST_STEPS, MOST_RANKS, MOST_SPANS = 3, 64, 20_000
MOST_BYTES, MOST_MERGED_BYTES, MOST_EVENTS = 64 << 20, 256 << 20, 20_000
MOST_ARGS, MOST_TEXT, MOST_REPLAYED = 16, 200, 6_000


@dataclass
class _Interval:
    name: str
    start_us: float
    end_us: float
    """The end of what is on record, of one that is open."""
    depth: int
    args: dict[str, Any]
    open: bool = False


@dataclass
class _RankTrace:
    rank: int
    label: str = ""
    lanes: dict[int, str] = field(default_factory=dict)
    spans: dict[int, list[_Interval]] = field(default_factory=dict)


def timeline(output_dir: Path, plan: Plan | None, left_out: LeftOut) -> dict[str, Any] | None:
    """Lanes of the ranks with their intervals in the last steps; None without a trace.

    With what bounds each step, and its rows and bytes on the edges of the plan, if there is one. Times are
    milliseconds since the first shown step began, on the clock of the trace.
    """
    traces = [_read(rank, events) for rank, events in _events(output_dir, left_out)]
    steps = sorted({step for trace in traces for step, _, _ in _steps(trace)})[-LAST_STEPS:]
    if not steps:
        return None
    bounds = [(a, b, step) for trace in traces for step, a, b in _steps(trace) if step in steps]
    start = min(a for a, _, _ in bounds)
    shown = [(trace, lane, span) for trace in traces for lane in trace.spans for span in trace.spans[lane]]
    shown = [item for item in shown if item[2].end_us > start or item[2].start_us >= start]
    if len(shown) > MOST_SPANS:
        shown.sort(key=lambda item: item[2].start_us - item[2].end_us)
        left_out.add("timeline", f"the longest {MOST_SPANS} of {len(shown)} intervals are shown")
        shown = shown[:MOST_SPANS]
    lanes: dict[tuple[int, int], dict[str, Any]] = {}
    for trace, lane, span in sorted(shown, key=lambda item: (item[0].rank, item[1], item[2].start_us)):
        about = {"rank": trace.rank, "label": trace.label, "lane": trace.lanes.get(lane, ""), "spans": []}
        lanes.setdefault((trace.rank, lane), about)["spans"].append(_row(span, start))
    return {
        "steps": [
            {
                "step": step,
                "start": _ms(min(a for a, _, s in bounds if s == step), start),
                "end": _ms(max(b for _, b, s in bounds if s == step), start),
            }
            for step in steps
        ],
        "lanes": list(lanes.values()),
        **_replayed(traces, steps, start, plan, left_out),
    }


def _replayed(
    traces: list[_RankTrace], steps: list[int], start: float, plan: Plan | None, left_out: LeftOut
) -> dict[str, Any]:
    """Step -> what bounds it ("bounds"), and what went along the edges of the plan ("edges")."""
    found: dict[str, Any] = {"bounds": [], "edges": {}}
    meeting = meeting_names(plan)
    for step in steps:
        spans = [
            (trace.rank, span)
            for trace in traces
            for span in trace.spans.get(0, [])
            if span.depth == 0 and span.args.get("step") == step and span.name not in OUTSIDE
        ]
        parts = [
            Part(rank, span.name, _met(span), _ms(span.start_us, start), _ms(span.end_us, start))
            for rank, span in spans[:MOST_REPLAYED]
        ]
        if len(spans) > MOST_REPLAYED:
            left_out.add(
                "timeline", f"what bounds step {step} is not looked for: it has {len(spans)} intervals"
            )
        elif parts:
            found["bounds"].append(bounds(step, parts, meeting))
        if plan is not None:
            found["edges"][str(step)] = step_edges(
                plan, [(rank, span.name, span.args) for rank, span in spans]
            )
    return found


def _met(span: _Interval) -> tuple[str, str]:
    """What an instruction has in common on all ranks that run it together."""
    return span.name, str(span.args.get("route") or span.args.get("link") or "")


def _events(output_dir: Path, left_out: LeftOut) -> list[tuple[int, Iterable[dict[str, Any]]]]:
    """(rank, its events): of the ranks' files, else of the merged one."""
    files = numbered(output_dir / TRACE_DIR, "rank_", ".jsonl", left_out)
    if not files:
        return _merged_events(output_dir / TRACE_FILE, left_out)
    if len(files) > MOST_RANKS:
        left_out.add("timeline", f"{MOST_RANKS} of {len(files)} ranks are shown, evenly chosen")
        files = [files[index * len(files) // MOST_RANKS] for index in range(MOST_RANKS)]
    most = MOST_BYTES // len(files)
    return [(rank, json_lines(path, most, left_out)) for rank, path in files]


def _merged_events(path: Path, left_out: LeftOut) -> list[tuple[int, Iterable[dict[str, Any]]]]:
    found: dict[int, deque[dict[str, Any]]] = {}
    taken = 0
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                taken += len(line)
                if taken > MOST_MERGED_BYTES:
                    left_out.add(path, f"only its first {MOST_MERGED_BYTES >> 20} MiB are read")
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
        left_out.add(path, f"it is damaged: {type(error).__name__}")
    return sorted(found.items())


def _read(rank: int, events: Iterable[dict[str, Any]]) -> _RankTrace:
    """Intervals of a rank by lane; ends whose beginnings lie before what was read are dropped."""
    trace = _RankTrace(rank, f"rank {rank}")
    stacks: dict[int, list[_Interval]] = {}
    last = 0.0
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
            stack.append(_Interval(_text(event.get("name")), at, at, len(stack), {}, True))
            trace.spans.setdefault(lane, []).append(stack[-1])
        elif kind == "E" and stack:
            span = stack.pop()
            span.end_us, span.open, span.args = max(at, span.start_us), False, _args(event)
        elif kind == "X" and (dur := number(event.get("dur"))) is not None:
            span = _Interval(_text(event.get("name")), at, at + max(0.0, dur), len(stack), _args(event))
            trace.spans.setdefault(lane, []).append(span)
    for stack in stacks.values():
        for span in stack:
            span.end_us = max(span.start_us, last)
    return trace


def _name(trace: _RankTrace, event: dict[str, Any], lane: int | None) -> None:
    args = event.get("args")
    name = _text(args.get("name")) if isinstance(args, dict) else ""
    if event.get("name") == "process_name" and name:
        trace.label = name
    elif event.get("name") == "thread_name" and lane is not None:
        trace.lanes[lane] = name


def _steps(trace: _RankTrace) -> list[tuple[int, float, float]]:
    """(step, begin, end) of the outermost intervals of the rank's instructions."""
    found: dict[int, tuple[float, float]] = {}
    for span in trace.spans.get(0, []):
        step = whole(span.args.get("step"))
        if span.depth == 0 and step is not None:
            low, high = found.get(step, (span.start_us, span.end_us))
            found[step] = (min(low, span.start_us), max(high, span.end_us))
    return [(step, low, high) for step, (low, high) in found.items()]


def _row(span: _Interval, start: float) -> list[Any]:
    """[name, start, duration, depth, whether it never ended, args]"""
    duration = round((span.end_us - span.start_us) / 1e3, 3)
    return [span.name, _ms(span.start_us, start), duration, span.depth, int(span.open), span.args]


def _ms(at_us: float, start_us: float) -> float:
    return round((at_us - start_us) / 1e3, 3)


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    if not isinstance(args, dict):
        return {}
    return {_text(key): _value(value) for key, value in list(args.items())[:MOST_ARGS]}


def _value(value: Any) -> Any:
    return value if whole(value) is not None or number(value) is not None else _text(value)


def _text(value: Any) -> str:
    return printable(str(value))[:MOST_TEXT]
