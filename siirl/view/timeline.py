"""What each rank did in the last traced steps, from the files that trainer.trace=true writes."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.runs.folder_reader import Skipped
from siirl.runs.rank_now import meeting_names
from siirl.view.critical_path import OUTSIDE, Part, bounds, ranks_of_path
from siirl.view.dag_share import step_edges
from siirl.view.rank_groups import RankGroup, group_lanes
from siirl.view.trace_reader import Interval, RankTrace, milliseconds, read_traces

LAST_STEPS, MOST_SPANS, MOST_REPLAYED = 3, 20_000, 6_000


def timeline(
    output_dir: Path, plan: Plan | None, groups: Mapping[str, list[RankGroup]], skipped: Skipped
) -> dict[str, Any] | None:
    """Lanes of ranks with their intervals in the last steps, and of groups of ranks; None without a trace.

    With what bounds each step, and its rows and bytes on the edges of the plan, if there is one. Times are
    milliseconds since the first shown step began, on the clock of the trace.
    """
    traces, shown = read_traces(output_dir, skipped)
    steps = sorted({step for trace in traces for step in trace.steps})[-LAST_STEPS:]
    if not steps:
        return None
    whole_after = max(trace.begun_before for trace in traces)
    steps = [step for step in steps if step > whole_after] or steps[-1:]
    bounds = [(*trace.steps[step], step) for trace in traces for step in steps if step in trace.steps]
    start = min(a for a, _, _ in bounds)
    meeting = meeting_names(plan)
    lanes = _lanes(shown, start, skipped)
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
        "chosen": len(traces) > len(shown),
        "groups": group_lanes(traces, groups, steps, start, meeting) if several else {},
        **_replayed(traces, steps, start, plan, meeting, skipped),
    }


def _lanes(traces: list[RankTrace], start: float, skipped: Skipped) -> list[dict[str, Any]]:
    shown = [(trace, lane, span) for trace in traces for lane in trace.spans for span in trace.spans[lane]]
    shown = [item for item in shown if item[2].end_us > start or item[2].start_us >= start]
    if len(shown) > MOST_SPANS:
        shown.sort(key=lambda item: item[2].start_us - item[2].end_us)
        skipped.add("timeline", f"the longest {MOST_SPANS} of {len(shown)} intervals are shown")
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
    skipped: Skipped,
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
        if len(spans) > MOST_REPLAYED and step != steps[-1]:
            skipped.add(
                "timeline", f"what bounds a step of {len(spans)} intervals is said of the last one alone"
            )
        elif parts := [_part(rank, span, start) for rank, span in spans]:
            few, num_ranks = ranks_of_path(parts, meeting, MOST_REPLAYED)
            found["bounds"].append(bounds(step, few, meeting, num_ranks))
        if plan is not None:
            found["edges"][str(step)] = step_edges(
                plan, [(rank, span.name, span.args) for rank, span in spans]
            )
    return found


def _part(rank: int, span: Interval, start: float) -> Part:
    return Part(
        rank, span.name, span.met, milliseconds(span.start_us, start), milliseconds(span.end_us, start)
    )
