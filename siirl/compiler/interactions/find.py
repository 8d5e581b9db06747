"""Interactions: rollouts and environments that depend on each other, as the stages of one conversation.

Pure. An interaction is entered at its first rollout, whose Run plays all episodes; the Runs of the other
rollouts, after it, hand out the rows of their agents.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from siirl.compiler.interactions.adapters import check_bases
from siirl.compiler.interactions.at_once import beside_of, check_at_once, most_turns
from siirl.compiler.interactions.outside import program_of
from siirl.compiler.interactions.stages import (
    assistant_turns,
    environment_of,
    is_conversation,
    is_member,
    loop_targets,
    make_stage,
    rollout_cfg,
)
from siirl.compiler.plan import AgentStage, InteractionPlan, ProgramStage
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Interactions, Nodes, Workflow
from siirl.config.resolve import get
from siirl.dag.graph import Graph
from siirl.dag.ops import FROZEN_TURNS, INTERACTION, SHARED_TURNS, TURNS, OpSpec
from siirl.errors import DagError, NotSupportedError, UserError
from siirl.types import BRANCH_FIELDS, FieldKey


def with_interactions(workflow: Workflow) -> Workflow:
    """The workflow with its interactions, in execution order, and the ops of the nodes that are part of them.

    DagError for one that cannot run or would not end.
    """
    check_bases(workflow)
    nodes, graph = workflow.nodes, workflow.graph
    found: dict[str, InteractionPlan] = {}
    for members in _connected(nodes, graph):
        interacting = [nodes[node_id] for node_id in members]
        if len(members) > 1 or is_conversation(interacting[0]):
            plan = _interaction(interacting, workflow)
            _check_sizes(plan, nodes)
            found[plan.entry] = plan
        elif interacting[0].op.is_environment:
            raise DagError(
                f"{interacting[0]} is an environment that no rollout acts in. Let it depend on a rollout."
            )
    _check_no_node_between(nodes, graph, found)
    inside = {stage.node for plan in found.values() for stage in plan.stages}
    for node in nodes.values():
        if node.id not in inside and (node.spec.loop or node.spec.agent_options):
            key = "loop" if node.spec.loop else "agent_options"
            raise DagError(f"{node} has {key}, but is no rollout or environment. Remove it.")
        if node.id not in inside and node.op.is_rollout and workflow.shared_policy(node) is not None:
            raise DagError(
                f"{node} has rollout.agent.share_instance, but is in no interaction: it would make rows that "
                "nobody trains on. Let it depend on another rollout; or give its agent an adapter of its "
                "own: model.lora_rank above 0, and an ACTOR node."
            )
    return replace(workflow, nodes=_as_members(nodes, found), interactions=found)


def _check_sizes(plan: InteractionPlan, nodes: Nodes) -> None:
    """DagError unless the agents whose rows are trained on have as many episodes as the entry plays."""
    entry = nodes[plan.entry]
    for stage in plan.stages:
        node = nodes[stage.node]
        if node.cfg.trainer.dump_rollouts_dir:
            raise NotSupportedError(
                f"not supported yet: {node}: trainer.dump_rollouts_dir with an interaction. Unset it."
            )
        if not stage.rows:
            continue
        for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n"):
            own, played = get(node.cfg, key), get(entry.cfg, key)
            if own != played:
                raise DagError(
                    f"{node} has {key}={own} and {entry}, where its episodes begin, {played}: its trainers "
                    "would cut mini-batches of other sizes than there are. Set the same on both."
                )


def _as_members(nodes: Nodes, interactions: Interactions) -> Nodes:
    """The nodes, with the ops of those that are part of an interaction."""
    ops: dict[str, OpSpec] = {}
    for plan in interactions.values():
        more = BRANCH_FIELDS if plan.branching else ()
        for stage in plan.speaking:
            silent = FROZEN_TURNS if stage.policy == stage.agent else SHARED_TURNS
            ops[stage.node] = _writing(TURNS, more) if stage.rows else silent
        ops[plan.entry] = _writing(INTERACTION, more)
    return {name: _with_op(node, ops[name]) if name in ops else node for name, node in nodes.items()}


def _writing(op: OpSpec, more: tuple[str, ...]) -> OpSpec:
    """The op, which writes further fields."""
    return replace(op, writes=lambda cfg: (*op.writes(cfg), *more)) if more else op


def _connected(nodes: Nodes, graph: Graph) -> list[list[str]]:
    """The sets of rollouts and environments that depend on each other directly, or that one's loop goes back
    to, in execution order."""
    home: dict[str, list[str]] = {}
    for node_id in graph.order:
        if not is_member(nodes[node_id]):
            continue
        joined = [node_id]
        for parent in (*graph.parents[node_id], *map(str, loop_targets(nodes[node_id]))):
            if parent in home and home[parent] is not joined:
                joined = home[parent] + joined
                for member in home[parent]:
                    home[member] = joined
        for member in joined:
            home[member] = joined
    distinct: list[list[str]] = []
    for group in home.values():
        if not any(group is other for other in distinct):
            distinct.append(group)
    order = {node_id: position for position, node_id in enumerate(graph.order)}
    return [sorted(set(group), key=order.__getitem__) for group in distinct]


def _interaction(members: list[ResolvedNode], workflow: Workflow) -> InteractionPlan:
    inside = {node.id for node in members}
    entry = _entry(members, workflow.graph, inside)
    program = program_of([entry, *(node for node in members if node is not entry)], workflow.nodes)
    beside = beside_of(members, workflow.graph)
    stages = tuple(make_stage(node, members, workflow, beside) for node in members)
    if program is None:
        check_at_once(stages)
    _check_sharing(members, workflow)
    _check_environments(members)
    policies = tuple(dict.fromkeys(stage.model for stage in stages if isinstance(stage, AgentStage)))
    if program is None:
        own = {
            node.id: 0 if node.op.is_environment else assistant_turns(rollout_cfg(node).multi_turn)
            for node in members
        }
        return InteractionPlan(entry.id, stages, policies, most_turns(stages, own, workflow.graph))
    first = ProgramStage(**vars(stages[0]), serve=program)
    return InteractionPlan(entry.id, (first, *stages[1:]), policies, program["max_requests"])


def _entry(members: list[ResolvedNode], graph: Graph, inside: set[str]) -> ResolvedNode:
    roots = [node for node in members if not inside.intersection(graph.parents[node.id])]
    for root in roots:
        if root.op.is_environment:
            raise DagError(
                f"{root} begins an interaction: an episode starts with a turn of an agent; the environment "
                "is reset before it, and its first observation is seen. Let it depend on the first rollout."
            )
    return roots[0]


def _check_environments(members: list[ResolvedNode]) -> None:
    """An episode has one environment: of several nodes, one says which, or all say the same."""
    nodes = [node for node in members if node.op.is_environment]
    given = [(node, env) for node in nodes if (env := environment_of(node))]
    if nodes and not given:
        raise DagError(
            f'{nodes[0]} names no environment. Set config: {{env_path: "file.py:Class"}}, or on the command '
            f"line dag.node_config.{nodes[0].id}.env_path=file.py:Class."
        )
    for (one, first), (other, second) in itertools.pairwise(given):
        if first != second:
            raise DagError(
                f"{one} and {other} name different environments ({first.path} {first.kwargs}, "
                f"{second.path} {second.kwargs}): an episode has one. Name it at one of them."
            )


def _check_sharing(members: list[ResolvedNode], workflow: Workflow) -> None:
    """share_instance names another agent of the interaction that has a policy of its own."""
    agents = {node.agent: node for node in members if not node.op.is_environment}
    for position, node in enumerate(members):
        target = None if node.op.is_environment else workflow.shared_policy(node)
        if target is None:
            continue
        key = f"{node}: rollout.agent.share_instance = {target}"
        if target not in agents:
            known = ", ".join(str(agent) for agent in agents if agent != node.agent) or "none"
            raise DagError(f"{key}: agent {target} is not in its interaction. Other agents there: {known}.")
        chain = [node.agent, target]
        while (after := workflow.shared_policy(agents[chain[-1]])) is not None:
            if after in chain or after not in agents:
                chain.append(after)
                break
            chain.append(after)
        if len(chain) > 2 or target == node.agent:
            way = " -> ".join(map(str, chain))
            raise DagError(
                f"{key}: agent {target} shares a policy itself ({way}): nobody would own it. Name an agent "
                "without share_instance."
            )
        if position == 0:
            raise DagError(
                f"{key}: the first agent of an interaction owns its policy. Set share_instance = "
                f"{node.agent} at {agents[target]} instead."
            )


def check_agents_of(workflow: Workflow) -> Iterator[UserError]:
    """DagError for an agent that shares a policy and has nodes of its own, or is scored but not trained."""
    nodes = workflow.nodes
    for plan in workflow.interactions.values():
        for stage in plan.speaking:
            node = nodes[stage.node]
            own = [other for other in nodes.values() if other.agent == stage.agent and not is_member(other)]
            if stage.policy != stage.agent and own:
                yield DagError(
                    f"{own[0]} belongs to agent {stage.agent}, which speaks with the policy of agent "
                    f"{stage.policy} ({node}: share_instance): its rows are among those of agent "
                    f"{stage.policy}. Remove the node; the column speaker tells the rows apart. Or let the "
                    "agent train an adapter of its own on that model: model.lora_rank above 0 for both "
                    "agents, and an ACTOR node."
                )
            if stage.policy != stage.agent and any("actor_rollout_ref.model." in k for k in node.overrides):
                yield DagError(
                    f"{node} sets actor_rollout_ref.model, but speaks with the policy of agent "
                    f"{stage.policy}. Remove it, or share_instance."
                )


def _check_no_node_between(nodes: Nodes, graph: Graph, found: Interactions) -> None:
    """Rollouts wait for other agents' rollouts turn by turn, not for what is computed of whole batches."""
    above = graph.above
    home = {stage.node: plan.entry for plan in found.values() for stage in plan.stages}
    rollouts = [node for node in nodes.values() if node.op.is_rollout]
    for node in rollouts:
        for other in rollouts:
            if other.id not in above[node.id]:
                continue
            between = [
                mid
                for mid in graph.order
                if other.id in above[mid] and mid in above[node.id] and mid not in home
            ]
            if between or home.get(node.id) != home.get(other.id):
                raise DagError(
                    f"{node} depends on {other} through {', '.join(map(repr, between))}: between the turns "
                    "of agents there are only environments. Let the rollout depend on the other one itself, "
                    "and do the rest in pre_process, post_process or an environment."
                )


def _with_op(node: ResolvedNode, op: OpSpec) -> ResolvedNode:
    reads, writes = op.reads(node.cfg), op.writes(node.cfg)
    return replace(
        node,
        op=op,
        reads=tuple(FieldKey(node.agent, name) for name in reads),
        writes=tuple(FieldKey(node.agent, name) for name in writes),
    )
