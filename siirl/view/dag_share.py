"""The plan's picture for the page, with the share of the step's time that each node takes."""

import functools
import re
from typing import Any

from siirl.compiler.plan import Plan
from siirl.observe.curve import Series
from siirl.observe.printable import printable
from siirl.parallel.placement import format_ranks
from siirl.runs.folder_reader import LeftOut
from siirl.runs.run_files import MetricHistory
from siirl.show.plan_picture import drawn_as_svg, link_mark, node_mark
from siirl.show.plan_text import home_ranks, node_ranks
from siirl.view.step_edges import last_edges

LAST_STEPS, MOST_NODES = 10, 300


def dag_of(job: dict[str, Any], history: MetricHistory, left_out: LeftOut) -> dict[str, Any] | None:
    """Picture and nodes of the plan in job.json; None without one. Raises what a damaged plan raises."""
    text = job.get("plan")
    if not isinstance(text, str):
        return None
    plan = _parsed(text)
    svg = ""
    if len(plan.nodes) <= MOST_NODES:
        svg = _picture(text)
    else:
        left_out.add(
            "the picture of the plan", f"{len(plan.nodes)} nodes are more than {MOST_NODES}; they are listed"
        )
    series = history.series
    edges, edges_step = last_edges(plan, series)
    return {
        "svg": svg,
        "nodes": _nodes(plan, series),
        "links": _links(plan, series),
        "edges": edges,
        "edges_step": edges_step,
        "parts": _parts(plan, series),
    }


@functools.lru_cache(maxsize=2)
def _parsed(plan_json: str) -> Plan:
    return Plan.from_json(plan_json)


@functools.lru_cache(maxsize=8)
def _picture(plan_json: str) -> str:
    """The element <svg> alone, without declarations and metadata, which name addresses."""
    svg = drawn_as_svg(_parsed(plan_json), {}, places=True)
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)


def _nodes(plan: Plan, series: Series) -> list[dict[str, Any]]:
    ranks, homes = node_ranks(plan), home_ranks(plan)
    return [
        {
            "mark": node_mark(plan, name),
            "name": printable(name),
            "op": printable(node.op),
            "agent": node.agent,
            "ranks": format_ranks(homes[name]),
            "serving": [rank for rank in homes[name] if rank not in ranks[name]],
            **_time(series, f"time/{name}_s"),
        }
        for name, node in plan.nodes.items()
    ]


def _links(plan: Plan, series: Series) -> list[dict[str, Any]]:
    """Which weights each link has brought last: after so many optimizer steps; None before the first."""
    found = []
    for name in plan.links:
        version = series.get(f"weight_sync/{name}_version", {})
        last = version[max(version)] if version else None
        found.append({"mark": link_mark(plan, name), "name": printable(name), "version": last})
    return found


def _parts(plan: Plan, series: Series) -> list[dict[str, Any]]:
    """What a step takes besides its nodes: loading, moving rows, weights, and what is in none of them."""
    names = [name for name in series if re.fullmatch(r"time/[^/]+_s", name)]
    other = {f"time/{name}_s" for name in plan.nodes} | {"time/step_s", "time/validation_s"}
    other |= {"time/checkpoint_s", "time/checkpoint_stage_s", "time/memory_checkpoint_s"}
    return [{"name": printable(name[5:-2]), **_time(series, name)} for name in names if name not in other]


def _time(series: Series, name: str) -> dict[str, float | None]:
    """Seconds of the slowest rank, mean of the last steps that have both, and their share of the step."""
    whole_s, part_s = series.get("time/step_s", {}), series.get(name, {})
    steps = sorted(whole_s.keys() & part_s.keys())[-LAST_STEPS:]
    all_s = sum(whole_s[step] for step in steps)
    if not steps or all_s <= 0:
        return {"mean_s": None, "share": None}
    spent_s = sum(part_s[step] for step in steps)
    return {"mean_s": float(f"{spent_s / len(steps):.4g}"), "share": round(spent_s / all_s, 4)}
