"""What each rank did in the last traced steps, from the files that trainer.trace=true writes."""

import functools
import gzip
import json
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.observe.printable import printable
from siirl.observe.trace import TRACE_DIR, TRACE_FILE
from siirl.runs.folder_reader import LeftOut, json_lines, number, numbered, whole
from siirl.view.critical_path import OUTSIDE, Part, bounds, meeting_names, ranks_of_path
from siirl.view.group_lanes import group_lanes
from siirl.view.rank_groups import RankGroup
from siirl.view.step_edges import step_edges
from siirl.view.trace_spans import Interval, RankTrace, milliseconds

LAST_STEPS, MOST_RANKS, MOST_SPANS, MOST_FILES = 3, 64, 20_000, 16_384
MOST_BYTES, MOST_MERGED_BYTES, MOST_EVENTS = 64 << 20, 256 << 20, 20_000
MOST_ARGS, MOST_TEXT, MOST_REPLAYED, MOST_NAMED = 16, 200, 6_000, 4


def timeline(
    output_dir: Path, plan: Plan | None, groups: Mapping[str, list[RankGroup]], left_out: LeftOut
) -> dict[str, Any] | None:
    """Lanes of ranks with their intervals in the last steps, and of groups of ranks; None without a trace.

    With what bounds each step, and its rows and bytes on the edges of the plan, if there is one. Times are
    milliseconds since the first shown step began, on the clock of the trace.
    """
    traces = [_read(rank, events, cut) for rank, events, cut in _events(output_dir, left_out)]
    steps = sorted({step for trace in traces for step in trace.steps})[-LAST_STEPS:]
    if not steps:
        return None
    whole_after = max(trace.begun_before for trace in traces)
    steps = [step for step in steps if step > whole_after] or steps[-1:]
    bounds = [(*trace.steps[step], step) for trace in traces for step in steps if step in trace.steps]
    start = min(a for a, _, _ in bounds)
    meeting = meeting_names(plan)
    lanes = _lanes(_chosen(traces, left_out), start, left_out)
    several = len(traces) > 1
    return {
        "steps": [
            {
                "step": step,
                "start": milliseconds(min(a for a, _, s in bounds if s == step), start),
                "end": milliseconds(max(b for _, b, s in bounds if s == step), start),
            }
            for step in steps
        ],
        "lanes": lanes,
        "chosen": len(traces) > MOST_RANKS,
        "groups": group_lanes(traces, groups, steps, start, meeting) if several else {},
        **_replayed(traces, steps, start, plan, meeting, left_out),
    }


def _chosen(traces: list[RankTrace], left_out: LeftOut) -> list[RankTrace]:
    """Ranks that are shown one by one."""
    if len(traces) <= MOST_RANKS:
        return traces
    left_out.add("timeline", f"{MOST_RANKS} of {len(traces)} ranks are shown one by one, evenly chosen")
    return [traces[index * len(traces) // MOST_RANKS] for index in range(MOST_RANKS)]


def _lanes(traces: list[RankTrace], start: float, left_out: LeftOut) -> list[dict[str, Any]]:
    shown = [(trace, lane, span) for trace in traces for lane in trace.spans for span in trace.spans[lane]]
    shown = [item for item in shown if item[2].end_us > start or item[2].start_us >= start]
    if len(shown) > MOST_SPANS:
        shown.sort(key=lambda item: item[2].start_us - item[2].end_us)
        left_out.add("timeline", f"the longest {MOST_SPANS} of {len(shown)} intervals are shown")
        shown = shown[:MOST_SPANS]
    lanes: dict[tuple[int, int], dict[str, Any]] = {}
    for trace, lane, span in sorted(shown, key=lambda item: (item[0].rank, item[1], item[2].start_us)):
        about = {"rank": trace.rank, "label": trace.label, "lane": trace.lanes.get(lane, ""), "spans": []}
        lanes.setdefault((trace.rank, lane), about)["spans"].append(span.row(start))
    return list(lanes.values())


def _replayed(
    traces: list[RankTrace],
    steps: list[int],
    start: float,
    plan: Plan | None,
    meeting: Collection[str],
    left_out: LeftOut,
) -> dict[str, Any]:
    """Step -> what bounds it ("bounds"), and what went along the edges of the plan ("edges")."""
    found: dict[str, Any] = {"bounds": [], "edges": {}}
    for step in steps:
        spans = [
            (trace.rank, span)
            for trace in traces
            for span in trace.instructions(step)
            if span.name not in OUTSIDE
        ]
        parts = [
            Part(
                rank,
                span.name,
                span.met,
                milliseconds(span.start_us, start),
                milliseconds(span.end_us, start),
            )
            for rank, span in spans
        ]
        if len(parts) > MOST_REPLAYED and step != steps[-1]:
            left_out.add(
                "timeline", f"what bounds a step of {len(parts)} intervals is said of the last one alone"
            )
        elif parts:
            few, num_ranks = ranks_of_path(parts, meeting, MOST_REPLAYED)
            found["bounds"].append(bounds(step, few, meeting, num_ranks))
        if plan is not None:
            found["edges"][str(step)] = step_edges(
                plan, [(rank, span.name, span.args) for rank, span in spans]
            )
    return found


def _events(output_dir: Path, left_out: LeftOut) -> Iterator[tuple[int, Iterable[dict[str, Any]], bool]]:
    """(rank, its events, whether earlier ones are left out): of the ranks' files, else of the merged one."""
    files = numbered(output_dir / TRACE_DIR, "rank_", ".jsonl", left_out)
    if not files:
        for rank, events in _merged_events(output_dir / TRACE_FILE, left_out):
            yield rank, events, False
        return
    if len(files) > MOST_FILES:
        left_out.add("timeline", f"the first {MOST_FILES} of {len(files)} ranks are read")
        files = files[:MOST_FILES]
    most, of_files = MOST_BYTES // len(files), LeftOut()
    for rank, path in files:
        yield rank, json_lines(path, most, of_files), _size(path) > most
    for what, why in list(of_files.items())[:MOST_NAMED]:
        left_out.add(what, why)
    if len(of_files) > MOST_NAMED:
        more = f"of {len(of_files) - MOST_NAMED} more ranks, too, not all is read"
        left_out.add("trace", f"{more}: the last {most >> 10} KiB of each")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


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


def _read(rank: int, events: Iterable[dict[str, Any]], cut: bool) -> RankTrace:
    """Intervals of a rank by lane; ends whose beginnings lie before what was read are dropped."""
    trace = RankTrace(rank, f"rank {rank}", cut)
    stacks: dict[int, list[Interval]] = {}
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
