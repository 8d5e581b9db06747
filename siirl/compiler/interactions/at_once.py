"""Which nodes of an interaction run at once, and what refuses it. Pure.

Two nodes run at once where an episode goes to both of them and no edge orders them: behind a node with
several followers and no route, or from the start on, where an episode begins at several agents. Each agent
reads what was said before its turn by whom it waits for, so what it says does not depend on who is faster.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from siirl.compiler.plan import EnvStage, StagePlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.dag.graph import Graph
from siirl.errors import DagError


def beside_of(members: Sequence[ResolvedNode], graph: Graph) -> dict[str, tuple[str, ...]]:
    """Node of an interaction -> the nodes that may run while it does, in order."""
    order = [node.id for node in members]
    below = {node: {node, *(other for other in order if node in graph.above[other])} for node in order}
    forks = [graph.children[node.id] for node in members if not (node.spec.agent_options or {}).get("route")]
    pairs: set[frozenset[str]] = set()
    for ways in (starts_of(order, graph), *forks):
        for one, other in combinations([way for way in ways if way in below], 2):
            apart = ((a, b) for a in below[one] - below[other] for b in below[other] - below[one])
            pairs |= {frozenset((a, b)) for a, b in apart if a not in below[b] and b not in below[a]}
    return {node: tuple(other for other in order if frozenset((node, other)) in pairs) for node in order}


def starts_of(order: Sequence[str], graph: Graph) -> list[str]:
    """The nodes of an interaction that an episode begins at."""
    return [node for node in order if not graph.above[node].intersection(order)]


def descendants(stages: Sequence[StagePlan]) -> dict[str, frozenset[str]]:
    """Node -> itself and all that follow it, by whatever way; a route goes to any later node."""
    below: dict[str, frozenset[str]] = {}
    for position in reversed(range(len(stages))):
        stage = stages[position]
        after = [s.node for s in stages[position + 1 :]] if stage.route else stage.following
        below[stage.node] = frozenset((stage.node,)).union(*(below[node] for node in after))
    return below


def check_at_once(stages: Sequence[StagePlan]) -> None:
    """DagError for nodes that cannot run at once with those beside them."""
    below = descendants(stages)
    by_node = {stage.node: stage for stage in stages}
    for stage in stages:
        who, others = f"node {stage.node!r}", " and ".join(map(repr, stage.beside))
        if not others:
            continue
        if isinstance(stage, EnvStage):
            raise DagError(
                f"{who}: the environment would step while {others} run: no edge orders them, so what it is "
                f"told would depend on who is faster. Let {stage.node} depend on {others}, or these on it."
            )
        if stage.route is not None:
            raise DagError(
                f"{who} has a route and runs at once with {others}: a route decides for the whole episode. "
                "Put it at a node that all of them depend on, or that depends on all of them."
            )
        same = [node for node in stage.beside if by_node[node].agent == stage.agent]
        if same:
            raise DagError(
                f"{who} and {same[0]!r} run at once, and agent {stage.agent} speaks at both: its next turn "
                "follows one of them. Let one depend on the other, or give one an agent_group of its own, "
                "with share_instance if it shall speak with the same policy."
            )
        if stage.back_to:
            _check_loop(stage, by_node, below)


def _check_loop(
    stage: StagePlan, by_node: Mapping[str, StagePlan], below: Mapping[str, frozenset[str]]
) -> None:
    """DagError unless the way back of a node with others beside it begins when all of these are done."""
    who, others = f"node {stage.node!r}", " and ".join(map(repr, stage.beside))
    if stage.following:
        raise DagError(
            f"{who} has a loop and runs at once with {others}: an episode goes back as a whole, once. Move "
            f"the loop to the node that depends on all of them, with to: {list(stage.back_to)}."
        )
    rivals = [node for node in stage.beside if by_node[node].back_to]
    if rivals:
        raise DagError(
            f"{who} and {rivals[0]!r} have a loop each and run at once: an episode goes back as a whole, "
            "when all of them have spoken. Leave one loop, whose `to` names each node that shall speak again."
        )
    if not any(stage.node in below[node] for node in stage.back_to):
        raise DagError(
            f"{who}: loop.to = {list(stage.back_to)} leads to other nodes and not to {stage.node}, which "
            f"would not run again, so its loop ends after one round. Add {stage.node} to `to`."
        )


def most_turns(stages: Sequence[StagePlan], own: Mapping[str, int], graph: Graph) -> int:
    """The turns of an episode at most: of its longest way, and of all nodes that run at once.

    own: turns of each node, in one run.
    """
    below = descendants(stages)
    longest: dict[str, int] = {}

    def of_all(nodes: Sequence[str]) -> int:
        if len(nodes) < 2:
            return max((longest[node] for node in nodes), default=0)
        return sum(own[node] for node in frozenset().union(*(below[node] for node in nodes)))

    for position in reversed(range(len(stages))):
        stage = stages[position]
        after = [s.node for s in stages[position + 1 :]]
        ways = [longest[node] for node in after] if stage.route else [of_all(stage.following)]
        longest[stage.node] = own[stage.node] + max(ways, default=0)
    total = of_all(starts_of([stage.node for stage in stages], graph))
    for position, stage in enumerate(stages):
        if stage.back_to:
            before = (
                [longest[s.node] for s in stages[: position + 1]] if stage.route else [of_all(stage.back_to)]
            )
            total += (stage.max_turns - 1) * max(before)
    return total
