"""The plan's picture for the page, with the share of the step's time that each node takes, and what went from
node to node in a step: rows that were read, and bytes that moved between ranks.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Load, Reshard, Run
from siirl.observe.columns import moved_metric, rows_metric
from siirl.observe.curve import Series
from siirl.observe.printable import printable
from siirl.parallel.placement import format_ranks
from siirl.runs.folder_reader import Skipped, whole
from siirl.runs.run_files import MetricHistory
from siirl.show.plan_picture import drawn_as_svg, edge_mark, link_mark, node_mark
from siirl.show.plan_text import home_ranks, node_ranks
from siirl.types import Layout

LOADED = "data"
"""What is read of the dataset comes from."""


def plan_edges(plan: Plan) -> dict[tuple[str, str], set[str]]:
    """(node that wrote, node that reads) -> the routes by which its fields came; none if they lay there."""
    wrote: dict[tuple[Any, str], str] = {}
    came: dict[tuple[Any, str], set[str]] = {}
    found: dict[tuple[str, str], set[str]] = {}
    for ins in plan.instructions:
        match ins:
            case Load(keys=keys, layout=layout):
                for key in keys:
                    wrote[key, layout], came[key, layout] = LOADED, set()
            case Reshard(keys=keys, route=name):
                route = plan.routes[name]
                for key in keys:
                    if (key, route.source) in wrote:
                        wrote[key, route.target] = wrote[key, route.source]
                        came[key, route.target] = came[key, route.source] | {name}
            case Run(node=node, reads=reads, writes=writes, source=source, target=target, joins=joins):
                for place in ((key, layout) for key, layout in [*((key, source) for key in reads), *joins]):
                    if place in wrote and wrote[place] != node:
                        found.setdefault((wrote[place], node), set()).update(came[place])
                for key in writes:
                    wrote[key, target], came[key, target] = node, set()
    return found


def edges(plan: Plan, rows: Mapping[str, float], moved: Mapping[str, float]) -> list[dict[str, Any]]:
    """The edges of a step. rows: of nodes, those that several ranks hold counted once. moved: bytes by route.

    Rows of an edge are those of its reader. Its bytes are those of the reshards that brought fields of it;
    fields of other edges that came along are in them.
    """
    return [
        {
            "mark": "" if parent == LOADED else edge_mark(plan, _last_stage(plan, parent, child), child),
            "to": node_mark(plan, child),
            "names": [printable(parent), printable(child)],
            "rows": whole(rows.get(child)),
            "bytes": int(sum(moved.get(route, 0) for route in routes)),
        }
        for (parent, child), routes in plan_edges(plan).items()
    ]


def step_edges(plan: Plan, spans: Iterable[tuple[int, str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The edges of a traced step. spans: (rank, name, arguments) of its instructions."""
    counting = {
        ins.node: _leaders(plan.layouts[ins.source])
        for ins in plan.instructions
        if isinstance(ins, Run) and ins.source
    }
    rows: dict[str, int] = {}
    moved: dict[str, int] = {}
    for rank, name, args in spans:
        count, size, route = whole(args.get("rows")), whole(args.get("bytes")), args.get("route")
        if count is not None and rank in counting.get(name, ()):
            rows[name] = rows.get(name, 0) + count
        if size is not None and isinstance(route, str):
            moved[route] = moved.get(route, 0) + size
    return edges(plan, rows, moved)


def last_edges(plan: Plan, series: Series) -> tuple[list[dict[str, Any]], int | None]:
    """(the edges of the last step that has rows on record, which step that is), of any run."""
    names = {rows_metric(node): node for node in plan.nodes}
    routes = {moved_metric(route): route for route in plan.routes}
    steps = [max(series[name]) for name in names if series.get(name)]
    if not steps:
        return [], None
    last = max(steps)

    def at_last(metrics: Mapping[str, str]) -> dict[str, float]:
        return {what: series[name][last] for name, what in metrics.items() if last in series.get(name, {})}

    rows = {node: round(count) for node, count in at_last(names).items()}
    return [*edges(plan, rows, at_last(routes)), *_turn_edges(plan, series, last)], last


def _turn_edges(plan: Plan, series: Series, step: int) -> list[dict[str, Any]]:
    """The arrows between agents of an interaction, with the turns that their reader took in all episodes."""
    several = len({node.agent for node in plan.nodes.values()}) > 1
    found = []
    for entry, talk in plan.interactions.items():
        prefix = f"agent_{plan.nodes[entry].agent}/" if several else ""
        stages = {stage.node: stage for stage in talk.stages}
        for child in (stage.node for stage in talk.speaking):
            names = ("episodes", "failed", f"{child}/turns")
            values = (series.get(f"{prefix}interaction/{name}", {}).get(step) for name in names)
            told = [value for value in values if value is not None]
            if len(told) < len(names):
                continue
            played, failed, each = told
            ends = {"to": node_mark(plan, child), "rows": None, "turns": round(played * (1 - failed) * each)}
            found += [
                {
                    "mark": edge_mark(plan, parent, child),
                    "names": [printable(parent), printable(child)],
                    **ends,
                    "bytes": 0,
                }
                for parent in plan.nodes[child].dependencies
                if parent in stages
            ]
    return found


def _last_stage(plan: Plan, parent: str, child: str) -> str:
    """Where the arrow to a child begins: what an agent said leaves its interaction where that ends."""
    talks = ({stage.node for stage in talk.stages} for talk in plan.interactions.values())
    stages = next((nodes for nodes in talks if parent in nodes), set())
    return next((node for node in plan.nodes[child].dependencies if node in stages), parent)


def _leaders(layout: Layout) -> frozenset[int]:
    """The first rank of each shard, which counts its rows."""
    first: dict[int, int] = {}
    for rank, shard in zip(layout.ranks, layout.shards, strict=True):
        first.setdefault(shard, rank)
    return frozenset(first.values())


LAST_STEPS, MOST_NODES = 10, 300


def dag_of(job: dict[str, Any], history: MetricHistory, skipped: Skipped) -> dict[str, Any] | None:
    """Picture and nodes of the plan in job.json; None without one. Raises what a damaged plan raises."""
    text = job.get("plan")
    if not isinstance(text, str):
        return None
    plan = _parsed(text)
    svg = ""
    if len(plan.nodes) <= MOST_NODES:
        svg = _picture(text)
    else:
        skipped.add(
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
