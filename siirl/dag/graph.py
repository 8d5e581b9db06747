"""Who depends on whom: a read-only graph of node ids, in one order for every process and hash seed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

from siirl.dag.spec import DagSpec
from siirl.errors import DagError, Place
from siirl.findings import Findings


@dataclass(frozen=True)
class Graph:
    """Nodes by id, each below what it depends on."""

    order: tuple[str, ...]
    """Topological, with the order of declaration among nodes that are free to run."""

    parents: dict[str, tuple[str, ...]]
    """Of each node, as it lists them; nodes in the order of declaration."""

    children: dict[str, tuple[str, ...]]
    """Of each node, in the order of declaration."""

    @cached_property
    def above(self) -> dict[str, frozenset[str]]:
        """All nodes that run before each node because it depends on them, directly or not."""
        above: dict[str, frozenset[str]] = {}
        for node in self.order:
            above[node] = frozenset(self.parents[node]).union(*(above[up] for up in self.parents[node]))
        return above

    def without(self, removed: Collection[str]) -> "Graph":
        """The graph of the other nodes; what a removed node depended on is passed on to its children."""
        if not removed:
            return self
        parents: dict[str, tuple[str, ...]] = {}
        for node in self.order:
            inherited: dict[str, None] = {}
            for parent in self.parents[node]:
                inherited.update(dict.fromkeys(parents[parent] if parent in removed else (parent,)))
            parents[node] = tuple(inherited)
        return _graph({node: parents[node] for node in self.parents if node not in removed})

    def with_followers(self, followers: Mapping[str, str]) -> "Graph":
        """The graph with new nodes, node -> the new one below it; what depended on the former, then depends
        on the latter."""
        parents: dict[str, tuple[str, ...]] = {}
        for node in self.parents:
            parents[node] = tuple(followers.get(parent, parent) for parent in self.parents[node])
            if node in followers:
                parents[followers[node]] = (node,)
        return _graph(parents)


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
    return _graph({node.node_id: node.dependencies for node in dag.nodes})


def _likely(name: str, ids: list[str]) -> str:
    """What a dependency was meant to be, if it is nearly an id; more often its node was removed."""
    close = get_close_matches(name, ids, n=1, cutoff=0.85)
    return f"Did you mean {close[0]!r}? " if close else ""


def _graph(parents: dict[str, tuple[str, ...]]) -> Graph:
    names = list(parents)
    position = {node: index for index, node in enumerate(names)}
    sorter = TopologicalSorter(parents)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = error.args[1][1:]  # it ends with the node that it begins with
        first = cycle.index(min(cycle, key=position.__getitem__))
        shown = " -> ".join([*cycle[first:], *cycle[:first], cycle[first]])
        raise DagError(
            f"the dependencies form a cycle: {shown}. Each node waits for the one before it, so none could "
            "start: remove one of these dependencies."
        ) from None
    order: list[str] = []
    free: list[int] = []  # positions of the nodes that could be next, as a heap
    while sorter.is_active():
        for node in sorter.get_ready():
            heappush(free, position[node])
        order.append(names[heappop(free)])
        sorter.done(order[-1])
    children = {node: tuple(below for below in parents if node in parents[below]) for node in parents}
    return Graph(tuple(order), parents, children)
