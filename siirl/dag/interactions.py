"""Interactions: rollouts and environments that depend on each other, as the stages of one conversation.

Pure. An interaction is entered at its first rollout, whose Run plays all episodes; the Runs of the other
rollouts, after it, hand out the rows of their agents.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from siirl.config.resolve import get
from siirl.config.rollout import ASSISTANT_TURNS, MultiTurnConfig
from siirl.dag.adapters import adapter_bases, check_bases, shared_policy
from siirl.dag.graph import Graph
from siirl.dag.names import suggest
from siirl.dag.ops import ENVIRONMENT, FROZEN_TURNS, INTERACTION, SHARED_TURNS, TURNS, OpSpec
from siirl.dag.plan import InteractionPlan, StagePlan
from siirl.dag.resolve import ResolvedNode
from siirl.dag.user_code import check_arguments, check_environment, check_reference
from siirl.errors import DagError, NotSupportedError
from siirl.types import FieldKey

Nodes = dict[str, ResolvedNode]
Interactions = dict[str, InteractionPlan]

LOOP_KEYS = ("to", "max_turns", "until")
AGENT_KEYS = ("process_path", "pre_process_kwargs", "post_process_kwargs", "route")
ENV_KEYS = ("env_path", "env_kwargs", "deadline_s", "obs_with_env", "rewards_with_env")
ENV_DEADLINE_S = 60.0
READ_BY_REWARDS = ("turn_id",)


def find_interactions(nodes: Nodes, graph: Graph) -> Interactions:
    """Entry node -> interaction, in execution order. DagError for one that cannot run or would not end."""
    check_bases(nodes.values())
    found: Interactions = {}
    for members in _connected(nodes, graph):
        interacting = [nodes[node_id] for node_id in members]
        if len(members) > 1 or _is_conversation(interacting[0]):
            plan = _interaction(interacting, nodes, graph)
            _check_sizes(plan, nodes)
            found[plan.entry] = plan
        elif interacting[0].op is ENVIRONMENT:
            raise DagError(
                f"{interacting[0]} is an environment that no rollout acts in. Let it depend on a rollout."
            )
    _check_no_node_between(nodes, graph, found)
    inside = {stage.node for plan in found.values() for stage in plan.stages}
    bases = adapter_bases(nodes.values())
    for node in nodes.values():
        if node.id not in inside and (node.spec.loop or node.spec.agent_options):
            key = "loop" if node.spec.loop else "agent_options"
            raise DagError(f"{node} has {key}, but is no rollout or environment. Remove it.")
        if node.id not in inside and node.op.is_rollout and shared_policy(node, bases) is not None:
            raise DagError(
                f"{node} has rollout.agent.share_instance, but is in no interaction: it would make rows that "
                "nobody trains on. Let it depend on another rollout; or give its agent an adapter of its "
                "own: model.lora_rank above 0, and an ACTOR node."
            )
    return found


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


def with_interactions(nodes: Nodes, interactions: Interactions) -> Nodes:
    """The nodes, with the ops of those that are part of an interaction or work on its rows."""
    ops: dict[str, OpSpec] = {}
    talking: set[int] = set()
    for plan in interactions.values():
        for stage in plan.stages:
            if stage.kind == "agent":
                silent = FROZEN_TURNS if stage.policy == stage.agent else SHARED_TURNS
                ops[stage.node] = TURNS if stage.rows else silent
                if stage.rows:
                    talking.add(stage.agent)
        ops[plan.entry] = INTERACTION
    changed: Nodes = {}
    for node in nodes.values():
        if node.id in ops:
            changed[node.id] = _with_op(node, ops[node.id])
        elif node.agent in talking and node.op.name == "function_reward":
            changed[node.id] = _reading(node, READ_BY_REWARDS)
        else:
            changed[node.id] = node
    return changed


def silent_nodes(interactions: Interactions) -> set[str]:
    """Nodes of interactions that have no instruction of their own: environments, and agents without rows."""
    return {
        stage.node
        for plan in interactions.values()
        for stage in plan.stages
        if stage.node != plan.entry and not stage.rows
    }


def rollout_cfg(node: ResolvedNode) -> Any:
    return node.cfg.actor_rollout_ref.rollout


def _is_member(node: ResolvedNode) -> bool:
    return node.op is ENVIRONMENT or node.op.is_rollout


def _is_conversation(node: ResolvedNode) -> bool:
    """Whether a rollout that is connected to no other is an interaction: it has turns, or code around it."""
    if not node.op.is_rollout:
        return False
    return bool(node.spec.loop or node.spec.agent_options or rollout_cfg(node).multi_turn.enable)


def _connected(nodes: Nodes, graph: Graph) -> list[list[str]]:
    """The sets of rollouts and environments that depend on each other directly, in execution order."""
    home: dict[str, list[str]] = {}
    for node_id in graph.order:
        if not _is_member(nodes[node_id]):
            continue
        joined = [node_id]
        for parent in graph.parents[node_id]:
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


def _interaction(members: list[ResolvedNode], nodes: Nodes, graph: Graph) -> InteractionPlan:
    inside = {node.id for node in members}
    entry = _entry(members, graph, inside)
    stages = tuple(_stage(node, members, nodes, graph) for node in members)
    _check_sharing(members, adapter_bases(nodes.values()))
    _check_environments(members)
    most_visits = 1 + sum(stage.max_turns - 1 for stage in stages if stage.back_to)
    speaking = [stage for stage in stages if stage.kind == "agent"]
    most_turns = sum(
        most_visits * assistant_turns(rollout_cfg(nodes[stage.node]).multi_turn) for stage in speaking
    )
    policies = dict.fromkeys(f"agent_{stage.policy}.rollout" for stage in speaking)
    return InteractionPlan(entry.id, stages, tuple(policies), most_turns)


def assistant_turns(multi_turn: MultiTurnConfig) -> int:
    """How often an agent speaks at most, until it is another's turn: again after each answer of tools."""
    if not multi_turn.enable:
        return 1
    users = multi_turn.max_user_turns
    bounds = [multi_turn.max_assistant_turns, None if users is None else users + 1]
    return min((bound for bound in bounds if bound is not None), default=ASSISTANT_TURNS)


def _entry(members: list[ResolvedNode], graph: Graph, inside: set[str]) -> ResolvedNode:
    roots = [node for node in members if not inside.intersection(graph.parents[node.id])]
    if len(roots) > 1:
        raise DagError(
            f"{' and '.join(map(str, roots))} both begin the same interaction: an episode starts at one "
            "agent. Let one depend on the other."
        )
    entry = roots[0]
    if entry.op is ENVIRONMENT:
        raise DagError(
            f"{entry} begins an interaction: an episode starts with a turn of an agent; the environment is "
            "reset before it, and its first observation is seen. Let it depend on the first rollout."
        )
    return entry


def _stage(node: ResolvedNode, members: list[ResolvedNode], nodes: Nodes, graph: Graph) -> StagePlan:
    if node.op.name == "replay":
        raise NotSupportedError(f"not supported yet: {node}: rollout.name=replay in an interaction.")
    order = [member.id for member in members]
    is_env = node.op is ENVIRONMENT
    options = dict(node.spec.agent_options or {})
    _check_keys(node, "agent_options", options, ("route",) if is_env else AGENT_KEYS)
    route = options.pop("route", None)
    children = [child for child in graph.children[node.id] if child in order]
    if len(children) > 1 and route is None:
        raise DagError(
            f"{node} is followed by {' and '.join(map(repr, children))}, and nothing says where an episode "
            'goes. Add agent_options: {route: "file.py:fn"}, whose fn(episode) returns one of these.'
        )
    back_to, max_turns, until = _loop(node, order)
    for name, reference in (("until", until), ("route", route)):
        if reference is not None:
            check_reference(reference, f"{node}: {name}")
            check_arguments(reference, 1, f"{node}: {name}")
    if not is_env:
        _check_tools(node)
    share = None if is_env else shared_policy(node, adapter_bases(nodes.values()))
    return StagePlan(
        node=node.id,
        kind="env" if is_env else "agent",
        agent=node.agent,
        policy=None if is_env else node.agent if share is None else share,
        rows=not is_env and share is None and not _is_frozen(node, nodes),
        following=children[0] if len(children) == 1 else None,
        back_to=back_to,
        max_turns=max_turns,
        until=until,
        route=route,
        options=_env_options(node) if is_env else _process_options(node, options),
    )


def _check_tools(node: ResolvedNode) -> None:
    """DagError unless the file of its tools and its parser are there; the run loads them."""
    multi_turn = rollout_cfg(node).multi_turn
    if not multi_turn.enable:
        return
    if ":" in multi_turn.format:
        check_reference(multi_turn.format, f"{node}: rollout.multi_turn.format")
        check_arguments(multi_turn.format, 1, f"{node}: rollout.multi_turn.format")
    path = multi_turn.tool_config_path
    if path is not None and not Path(path).expanduser().is_file():
        raise DagError(
            f"{node}: rollout.multi_turn.tool_config_path = {path!r}: there is no such file. Correct "
            "the path, or leave it out: then there are no tools."
        )


def _check_keys(node: ResolvedNode, key: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise DagError(f"{node}: {key} has the unknown key {name!r}. {suggest(name, known)}")


def _loop(node: ResolvedNode, order: list[str]) -> tuple[str | None, int, str | None]:
    """(where an episode goes back to, most visits of the node, reference of until)."""
    loop = node.spec.loop
    if loop is None:
        return None, 1, None
    _check_keys(node, "loop", loop, LOOP_KEYS)
    turns = loop.get("max_turns")
    if not isinstance(turns, int) or isinstance(turns, bool) or turns < 1:
        raise DagError(
            f"{node}: loop.max_turns = {turns!r}: without a whole number of at least 1 an episode might "
            "never end. Set how often the node may run in one episode, e.g. loop: {max_turns: 4}."
        )
    target = loop.get("to", order[0])
    if target not in order[: order.index(node.id) + 1]:
        raise DagError(
            f"{node}: loop.to = {target!r} is no node of its interaction up to it "
            f"({', '.join(order[: order.index(node.id) + 1])}): a loop goes back. "
            f"{suggest(str(target), order)}"
        )
    return target, turns, loop.get("until")


def _process_options(node: ResolvedNode, options: dict[str, Any]) -> dict[str, Any]:
    """process_path and the arguments of its functions: of agent_options, else of rollout.agent."""
    agent = rollout_cfg(node).agent
    path = options.get("process_path", agent.process_path)
    kwargs = {
        "pre_process_kwargs": options.get("pre_process_kwargs", agent.pre_process_kwargs),
        "post_process_kwargs": options.get("post_process_kwargs", agent.post_process_kwargs),
    }
    if path is None:
        if given := [name for name, value in kwargs.items() if value]:
            raise DagError(f"{node}: {given[0]} are arguments of no function. Set process_path.")
        return {}
    found = [name for name in ("pre_process", "post_process") if _defines(path, name, str(node))]
    if not found:
        raise DagError(f"{node}: {path} defines neither pre_process nor post_process. Define one of them.")
    return {"process_path": path, **{f"{name}_kwargs": kwargs[f"{name}_kwargs"] for name in found}}


def _defines(path: str, name: str, who: str) -> bool:
    if path.endswith(".py") and not Path(path).expanduser().is_file():
        raise DagError(f"{who}: process_path {path!r} cannot be read: there is no such file.")
    try:
        check_reference(f"{path}:{name}", who)
    except DagError as error:
        if "has no" in str(error):
            return False
        raise
    check_arguments(f"{path}:{name}", 2, f"{who}: process_path", more=True)
    return True


def _env_options(node: ResolvedNode) -> dict[str, Any]:
    _check_keys(node, "config", node.options, ENV_KEYS)
    path, kwargs = node.options.get("env_path"), node.options.get("env_kwargs", {})
    path = path[0] if isinstance(path, list) and len(path) == 1 else path
    if isinstance(path, list) and len(path) > 1:
        raise DagError(
            f"{node}: env_path = {path} names {len(path)} environments: an episode has one. Name one, which "
            "may hold others."
        )
    if path is not None and (not isinstance(path, str) or ":" not in path):
        raise DagError(f'{node}: env_path = {path!r} names no class. Write env_path: "file.py:Class".')
    if not isinstance(kwargs, dict):
        raise DagError(f"{node}: env_kwargs = {kwargs!r} is no mapping of arguments. Write {{name: value}}.")
    if path is not None:
        check_reference(path, f"{node}: env_path")
        check_environment(path, f"{node}: env_path", kwargs)
    deadline_s = node.options.get("deadline_s", ENV_DEADLINE_S)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or deadline_s <= 0:
        raise DagError(f"{node}: deadline_s = {deadline_s!r} is no number of seconds above 0. Correct it.")
    uses = {key: node.options.get(key, True) for key in ("obs_with_env", "rewards_with_env")}
    for key, value in uses.items():
        if not isinstance(value, bool):
            raise DagError(f"{node}: {key} = {value!r} is neither true nor false. Correct it.")
    if path is None:
        return uses
    return {"env_path": path, "env_kwargs": kwargs, "deadline_s": float(deadline_s), **uses}


def _environment_of(node: ResolvedNode) -> dict[str, Any]:
    """What says which environment it is: the options, without how the node uses it."""
    return {key: value for key, value in _env_options(node).items() if not key.endswith("_with_env")}


def _check_environments(members: list[ResolvedNode]) -> None:
    """An episode has one environment: of several nodes, one says which, or all say the same."""
    nodes = [node for node in members if node.op is ENVIRONMENT]
    given = [(node, options) for node in nodes if "env_path" in (options := _environment_of(node))]
    if nodes and not given:
        raise DagError(
            f'{nodes[0]} names no environment. Set config: {{env_path: "file.py:Class"}}, or on the command '
            f"line dag.node_config.{nodes[0].id}.env_path=file.py:Class."
        )
    for (one, first), (other, second) in itertools.pairwise(given):
        if first != second:
            raise DagError(
                f"{one} and {other} name different environments ({first['env_path']} {first['env_kwargs']}, "
                f"{second['env_path']} {second['env_kwargs']}): an episode has one. Name it at one of them."
            )


def _is_frozen(node: ResolvedNode, nodes: Nodes) -> bool:
    """Whether the agent is never trained: the DAG has nothing for it but its rollout."""
    return not any(other.agent == node.agent and not _is_member(other) for other in nodes.values())


def _check_sharing(members: list[ResolvedNode], bases: dict[int, int]) -> None:
    """share_instance names another agent of the interaction that has a policy of its own."""
    agents = {node.agent: node for node in members if node.op is not ENVIRONMENT}
    for position, node in enumerate(members):
        target = None if node.op is ENVIRONMENT else shared_policy(node, bases)
        if target is None:
            continue
        key = f"{node}: rollout.agent.share_instance = {target}"
        if target not in agents:
            known = ", ".join(str(agent) for agent in agents if agent != node.agent) or "none"
            raise DagError(f"{key}: agent {target} is not in its interaction. Other agents there: {known}.")
        chain = [node.agent, target]
        while (after := shared_policy(agents[chain[-1]], bases)) is not None:
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


def check_agents_of(interactions: Interactions, nodes: Nodes) -> None:
    """DagError for an agent that shares a policy and has nodes of its own, or is scored but not trained."""
    for plan in interactions.values():
        for stage in plan.stages:
            if stage.kind == "env":
                continue
            node = nodes[stage.node]
            own = [other for other in nodes.values() if other.agent == stage.agent and not _is_member(other)]
            if stage.policy != stage.agent and own:
                raise DagError(
                    f"{own[0]} belongs to agent {stage.agent}, which speaks with the policy of agent "
                    f"{stage.policy} ({node}: share_instance): its rows are among those of agent "
                    f"{stage.policy}. Remove the node; the column speaker tells the rows apart. Or let the "
                    "agent train an adapter of its own on that model: model.lora_rank above 0 for both "
                    "agents, and an ACTOR node."
                )
            if stage.policy != stage.agent and any("actor_rollout_ref.model." in k for k in node.overrides):
                raise DagError(
                    f"{node} sets actor_rollout_ref.model, but speaks with the policy of agent "
                    f"{stage.policy}. Remove it, or share_instance."
                )


def _check_no_node_between(nodes: Nodes, graph: Graph, found: Interactions) -> None:
    """Rollouts wait for other agents' rollouts turn by turn, not for what is computed of whole batches."""
    above = graph.ancestors()
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


def _reading(node: ResolvedNode, names: tuple[str, ...]) -> ResolvedNode:
    keys = dict.fromkeys([*node.reads, *(FieldKey(node.agent, name) for name in names)])
    return replace(node, reads=tuple(keys))
