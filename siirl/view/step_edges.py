"""What went from node to node in a step: rows that were read, and bytes that moved between ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

from siirl.compiler.plan import Load, Plan, Reshard, Run
from siirl.observe.columns import moved_metric, rows_metric
from siirl.observe.curve import Series
from siirl.observe.printable import printable
from siirl.runs.folder_reader import whole
from siirl.show.plan_picture import edge_mark, node_mark
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
