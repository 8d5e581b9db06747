"""Who depends on whom: a read-only graph of node ids, in one order for every process and hash seed."""

from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches

from siirl.dag.spec import DagSpec
from siirl.errors import DagError, Place
from siirl.findings import Findings


@dataclass(frozen=True)
class Graph:
    """Nodes by id, each below what it depends on."""

    order: tuple[str, ...]
    """Topological, with the order of declaration among nodes that are free to run."""

    parents: dict[str, tuple[str, ...]]
    """Of each node, as it lists them."""

    children: dict[str, tuple[str, ...]]
    """Of each node, in the order of declaration."""

    above: dict[str, frozenset[str]]
    """All nodes that run before each node because it depends on them, directly or not."""

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
        left = [node for node in self.order if node not in removed]
        above = {node: self.above[node].difference(removed) for node in left}
        return _graph(left, {node: parents[node] for node in left}, above)


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


def _graph(
    declared: list[str],
    parents: dict[str, tuple[str, ...]],
    above: dict[str, frozenset[str]] | None = None,
) -> Graph:
    import networkx as nx  # here, as it takes a third of a second: only a command that compiles waits for it

    found = nx.DiGraph()
    found.add_nodes_from(declared)
    found.add_edges_from((parent, node) for node in declared for parent in parents[node])
    position = {node: index for index, node in enumerate(declared)}
    try:
        order = tuple(nx.lexicographical_topological_sort(found, key=position.__getitem__))
    except nx.NetworkXUnfeasible:
        cycle = [node for node, _ in nx.find_cycle(found)]
        first = cycle.index(min(cycle, key=position.__getitem__))
        shown = " -> ".join([*cycle[first:], *cycle[:first], cycle[first]])
        raise DagError(
            f"the dependencies form a cycle: {shown}. Each node waits for the one before it, so none could "
            "start: remove one of these dependencies."
        ) from None
    if above is None:
        above = {node: frozenset(nx.ancestors(found, node)) for node in order}
    return Graph(order, parents, {node: tuple(found.successors(node)) for node in declared}, above)
