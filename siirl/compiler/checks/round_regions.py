"""Nodes above one that repeats run once a round: what of them may be used elsewhere. Pure."""

from collections.abc import Mapping

from siirl.compiler.layouts import NodePlacement
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes
from siirl.dag.graph import Graph
from siirl.errors import DagError, NotSupportedError


def check_rounds(kept: Nodes, graph: Graph, places: Mapping[str, NodePlacement]) -> None:
    """None of them trains, each is in the rounds of one node, and no row of theirs is used past these."""
    ancestors = graph.above
    repeating = [node for node in kept.values() if node.op.repeats]
    for node in repeating:
        for other_id in ancestors[node.id]:
            if kept[other_id].op.side_effect or kept[other_id].op.repeats:
                raise DagError(
                    f"{kept[other_id]} is above {node}, which repeats what is above it until its batch is "
                    "full: it would run several times in a step. Let it depend on that node instead."
                )
    for position, node in enumerate(repeating):
        for second in repeating[position + 1 :]:
            shared = [other for other in graph.order if other in ancestors[node.id] & ancestors[second.id]]
            if shared:
                raise NotSupportedError(
                    f"not supported yet: {kept[shared[0]]} is above both {node} and {second}, which repeat "
                    "what is above them in rounds of their own: it would make other rows for each. Let only "
                    "one of them depend on it."
                )
    for node in repeating:
        _check_use(node, kept, ancestors[node.id], places)


def _check_use(
    node: ResolvedNode, kept: Nodes, inside: frozenset[str], places: Mapping[str, NodePlacement]
) -> None:
    """No node outside the rounds of `node` works on rows that are made in them, or reads their fields."""
    makers = {places[other].data_agent: other for other in sorted(inside, reverse=True)}
    sampled = places[node.id].data_agent
    for other in kept.values():
        if other.id in inside or other is node:
            continue
        agent = places[other.id].data_agent
        if agent == sampled and places[other.id].depth <= places[node.id].depth:
            raise DagError(
                f"{other} works on rows that {node} samples again until its batch is full: it would see "
                f"the last round only. Add {node.id!r} to the dependencies of {other.id!r}."
            )
        used = {agent, *(key.agent for key in other.reads)}
        if agent == sampled:
            used.remove(sampled)  # those that it has chosen
        for lost in sorted(used & makers.keys()):
            raise DagError(
                f"{other} uses rows of agent {lost}, which are made anew in every round of {node} and gone "
                f"after it: {makers[lost]!r} is above it. Let {node.id!r} not depend on {makers[lost]!r}, or "
                f"{other.id!r} use no rows of agent {lost}."
            )
