"""Dynamic sampling and drawn rows: where they are asked for, what of the nodes above is used. Pure.

Nodes above one that repeats run once a round.
"""

from collections.abc import Iterator, Mapping

from siirl.compiler.layouts import NodePlacement
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes, Workflow
from siirl.dag.graph import Graph
from siirl.errors import DagError, NotSupportedError, UserError


def check_sampling(kept: Workflow) -> Iterator[UserError]:
    """DagError if dynamic sampling is asked for, and no node of the agent does it.

    Agents without rows need none. NotSupportedError in an interaction of which several agents have rows.
    """
    sampling = {node.agent for node in kept.nodes.values() if node.op.repeats}
    asking = [n for n in kept.nodes.values() if n.op.is_rollout and n.cfg.algorithm.filter_groups.enable]
    for plan in kept.interactions.values():
        talking = [stage for stage in plan.stages if stage.rows]
        asked = [s for s in talking if s.agent in sampling or any(n.id == s.node for n in asking)]
        if len(talking) > 1 and asked:
            yield NotSupportedError(
                f"not supported yet: algorithm.filter_groups.enable=true for {kept.nodes[asked[0].node]}: "
                f"agents {' and '.join(str(stage.agent) for stage in talking)} of its interaction are "
                "trained, and the groups that one of them drops may be those that another one keeps. Set "
                "algorithm.filter_groups.enable=false, and remove it from the configurations of nodes."
            )
            return
    for node in asking:
        if node.agent not in sampling and (node.id not in kept.stages or kept.stages[node.id].rows):
            yield DagError(
                f"algorithm.filter_groups.enable=true, but no node filters the groups of {node}. Add a node "
                "with node_type COMPUTE, node_role POSTPROCESS_SAMPLING below its reward, as in "
                "dag_templates/dapo.yaml, or set algorithm.filter_groups.enable=false."
            )


def check_resampling(kept: Workflow) -> Iterator[UserError]:
    """DagError if PF-PPO is asked for, and no node of the agent resamples; or if its draws are joined.

    Agents without rows of their own need none.
    """
    resampling = {node.agent: node for node in kept.nodes.values() if node.op.draws}
    rowless = {stage.node for stage in kept.stages.values() if not stage.rows}
    for node in kept.nodes.values():
        sampler = resampling.get(node.agent)
        asks = node.op.is_rollout and node.cfg.algorithm.use_pf_ppo and node.id not in rowless
        if asks and sampler is None:
            yield DagError(
                f"algorithm.use_pf_ppo=true, but no node resamples the rows of {node}. Add a node with "
                "node_type COMPUTE, node_role POSTPROCESS_SAMPLING above the training, as in "
                "dag_templates/ppo.yaml, or set algorithm.use_pf_ppo=false."
            )
        others = [key for key in node.reads if kept.joins(node, key)]
        if sampler is not None and others and sampler.id in kept.graph.above[node.id]:
            yield DagError(
                f"{node} reads {others[0]} by episode, below {sampler}, of which each draw is an episode of "
                f"its own. Let {sampler.id!r} depend on {node.id!r} instead."
            )


def check_rounds(kept: Nodes, graph: Graph, places: Mapping[str, NodePlacement]) -> Iterator[UserError]:
    """None of them trains, each is in the rounds of one node, and no row of theirs is used past these."""
    repeating = [node for node in kept.values() if node.op.repeats]
    shared = [*_check_apart(repeating, kept, graph)]
    yield from shared
    for node in () if shared else repeating:
        yield from _check_use(node, kept, graph.above[node.id], places)


def _check_apart(repeating: list[ResolvedNode], kept: Nodes, graph: Graph) -> Iterator[UserError]:
    """None of the nodes above trains, or is in the rounds of two of them."""
    ancestors = graph.above
    for node in repeating:
        for other_id in ancestors[node.id]:
            if kept[other_id].op.side_effect or kept[other_id].op.repeats:
                yield DagError(
                    f"{kept[other_id]} is above {node}, which repeats what is above it until its batch is "
                    "full: it would run several times in a step. Let it depend on that node instead."
                )
    for position, node in enumerate(repeating):
        for second in repeating[position + 1 :]:
            if node.id in ancestors[second.id] or second.id in ancestors[node.id]:
                continue  # said above
            shared = [other for other in graph.order if other in ancestors[node.id] & ancestors[second.id]]
            if shared:
                yield NotSupportedError(
                    f"not supported yet: {kept[shared[0]]} is above both {node} and {second}, which repeat "
                    "what is above them in rounds of their own: it would make other rows for each. Let only "
                    "one of them depend on it."
                )


def _check_use(
    node: ResolvedNode, kept: Nodes, inside: frozenset[str], places: Mapping[str, NodePlacement]
) -> Iterator[UserError]:
    """No node outside the rounds of `node` works on rows that are made in them, or reads their fields."""
    makers = {places[other].data_agent: other for other in sorted(inside, reverse=True)}
    sampled = places[node.id].data_agent
    for other in kept.values():
        if other.id in inside or other is node:
            continue
        agent = places[other.id].data_agent
        if agent == sampled and places[other.id].depth <= places[node.id].depth:
            yield DagError(
                f"{other} works on rows that {node} samples again until its batch is full: it would see "
                f"the last round only. Add {node.id!r} to the dependencies of {other.id!r}."
            )
            continue
        used = {agent, *(key.agent for key in other.reads)}
        if agent == sampled:
            used.remove(sampled)  # those that it has chosen
        for lost in sorted(used & makers.keys()):
            yield DagError(
                f"{other} uses rows of agent {lost}, which are made anew in every round of {node} and gone "
                f"after it: {makers[lost]!r} is above it. Let {node.id!r} not depend on {makers[lost]!r}, or "
                f"{other.id!r} use no rows of agent {lost}."
            )
