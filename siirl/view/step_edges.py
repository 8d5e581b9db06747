"""What went from node to node in a traced step: rows that were read, and bytes that moved between ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

from siirl.compiler.plan import Load, Plan, Reshard, Run
from siirl.runs.folder_reader import whole
from siirl.show.plan_picture import node_mark
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


def step_edges(plan: Plan, spans: Iterable[tuple[int, str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The edges of a step. spans: (rank, name, arguments) of its instructions.

    rows: of the reader, those that several ranks hold counted once. bytes: of all ranks, by the reshards that
    brought fields of this edge; fields of other edges that came along are in them.
    """
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
    return [
        {
            "from": "" if parent == LOADED else node_mark(plan, parent),
            "to": node_mark(plan, child),
            "names": [parent, child],
            "drawn": parent == LOADED or parent in plan.nodes[child].dependencies,
            "rows": rows.get(child),
            "bytes": sum(moved.get(route, 0) for route in routes),
        }
        for (parent, child), routes in plan_edges(plan).items()
    ]


def _leaders(layout: Layout) -> frozenset[int]:
    """The first rank of each shard, which counts its rows."""
    first: dict[int, int] = {}
    for rank, shard in zip(layout.ranks, layout.shards, strict=True):
        first.setdefault(shard, rank)
    return frozenset(first.values())
