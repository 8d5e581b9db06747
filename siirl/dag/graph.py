"""Who depends on whom: a read-only graph of node ids, in one order for every process and hash seed."""

import heapq
from dataclasses import dataclass
from difflib import get_close_matches

from siirl.dag.spec import DagSpec
from siirl.errors import DagError, Place
from siirl.findings import Findings


@dataclass(frozen=True)
class Graph:
    """order: topological, with the order of declaration among nodes that are free to run.

    parents and children: of each node, in the order of declaration (parents: as the node lists them).
    """

    order: tuple[str, ...]
    parents: dict[str, tuple[str, ...]]
    children: dict[str, tuple[str, ...]]

    def ancestors(self) -> dict[str, set[str]]:
        """All nodes that run before each node because it depends on them, directly or not."""
        above: dict[str, set[str]] = {}
        for node in self.order:
            above[node] = set(self.parents[node]).union(*(above[parent] for parent in self.parents[node]))
        return above

    def without(self, removed: set[str]) -> "Graph":
        """The graph of the other nodes; what a removed node depended on is passed on to its children."""
        parents: dict[str, tuple[str, ...]] = {}
        for node in self.order:
            inherited: dict[str, None] = {}
            for parent in self.parents[node]:
                inherited.update(dict.fromkeys(parents[parent] if parent in removed else (parent,)))
            parents[node] = tuple(inherited)
        return _graph(
            [n for n in self.order if n not in removed],
            {n: p for n, p in parents.items() if n not in removed},
        )


def build_graph(dag: DagSpec) -> Graph:
    """The graph of a DAG. DagError for an unknown dependency or a cycle, which is printed node by node."""
    ids = [node.node_id for node in dag.nodes]
    known = set(ids)
    found = Findings(Place.WORKFLOW)
    found.take(
        DagError(
            f"{node} depends on {dependency!r}, but the DAG has no such node. "
            f"{_likely(dependency, ids)}Add the node, or remove it from the dependencies."
        )
        for node in dag.nodes
        for dependency in node.dependencies
        if dependency not in known
    )
    found.close()
    return _graph(ids, {node.node_id: node.dependencies for node in dag.nodes})


def _likely(name: str, ids: list[str]) -> str:
    """What a dependency was meant to be, if it is nearly an id; more often its node was removed."""
    close = get_close_matches(name, ids, n=1, cutoff=0.85)
    return f"Did you mean {close[0]!r}? " if close else ""


def _graph(declared: list[str], parents: dict[str, tuple[str, ...]]) -> Graph:
    position = {node: index for index, node in enumerate(declared)}
    children: dict[str, list[str]] = {node: [] for node in declared}
    for node in declared:
        for parent in parents[node]:
            children[parent].append(node)
    waiting = {node: len(parents[node]) for node in declared}
    ready = [position[node] for node in declared if not waiting[node]]
    order: list[str] = []
    while ready:
        node = declared[heapq.heappop(ready)]
        order.append(node)
        for child in children[node]:
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, position[child])
    if len(order) < len(declared):
        stuck = [node for node in declared if waiting[node]]
        raise DagError(
            f"the dependencies form a cycle: {' -> '.join(_cycle(stuck, parents))}. "
            "Each node waits for the one before it, so none could start: remove one of these dependencies."
        )
    return Graph(tuple(order), parents, {node: tuple(below) for node, below in children.items()})


def _cycle(stuck: list[str], parents: dict[str, tuple[str, ...]]) -> list[str]:
    """A cycle among nodes that never become ready, in the direction of the rows, closed by its first node."""
    members = set(stuck)
    path = [stuck[0]]
    while True:
        parent = next(parent for parent in parents[path[-1]] if parent in members)
        if parent in path:
            cycle = [*path[path.index(parent) :], parent][::-1]
            first = min(range(len(cycle) - 1), key=lambda index: stuck.index(cycle[index]))
            return [*cycle[first:-1], *cycle[: first + 1]]
        path.append(parent)
