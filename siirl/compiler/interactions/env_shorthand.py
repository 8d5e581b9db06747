"""rollout.agent.env_path: a rollout that acts in an environment becomes two: ENV_INTERACT follows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from siirl.compiler.resolved_node import ResolvedNode
from siirl.config.rollout import AgentConfig
from siirl.dag.spec import DagSpec, NodeSpec, dag_spec, node_spec
from siirl.errors import DagError

USES = ("obs_with_env", "rewards_with_env")


def with_environments(dag: DagSpec, nodes: Mapping[str, ResolvedNode]) -> tuple[DagSpec, dict[str, str]]:
    """The DAG with a node "<id>_env" for every rollout that has rollout.agent.env_path, and these by rollout.

    It is below the rollout, and takes its loop and its route: where an episode goes is decided when the
    environment has answered.
    """
    acting = {node.node_id: f"{node.node_id}_env" for node in dag.nodes if _acts(nodes[node.node_id])}
    _check_uses(nodes, acting)
    if not acting:
        return dag, {}
    changed: list[NodeSpec] = []
    for node in dag.nodes:
        if node.node_id not in acting:
            changed.append(node)
            continue
        options = dict(node.agent_options or {})
        route = options.pop("route", None)
        changed.append(replace(node, loop=None, agent_options=options or None))
        changed.append(_environment(node, acting[node.node_id], _agent(nodes[node.node_id]), route))
    return dag_spec(dag.dag_id, changed, dag.description), acting


def _agent(node: ResolvedNode) -> AgentConfig:
    return node.cfg.actor_rollout_ref.rollout.agent


def _acts(node: ResolvedNode) -> bool:
    """Whether its turns are actions. DagError for keys of an environment that is not named, or not used."""
    if not node.op.is_rollout:
        return False
    agent = _agent(node)
    used = [key for key, used in zip(USES, (agent.obs_with_env, agent.rewards_with_env), strict=True) if used]
    if agent.env_path and not used:
        raise DagError(
            f"{node}: rollout.agent.env_path = {list(agent.env_path)}, but neither obs_with_env nor "
            "rewards_with_env is true: the agent would get nothing from it. Set rollout.agent.obs_with_env "
            "or rollout.agent.rewards_with_env to true, or remove env_path."
        )
    return bool(agent.env_path)


def _check_uses(nodes: Mapping[str, ResolvedNode], acting: Mapping[str, str]) -> None:
    """DagError for a rollout without env_path that asks for what no other agent's environment gives."""
    for node in nodes.values():
        if not node.op.is_rollout or node.id in acting:
            continue
        for key in USES:
            own = node.overrides.get(f"actor_rollout_ref.rollout.agent.{key}") is True
            deaf = [name for name in acting if not getattr(_agent(nodes[name]), key)]
            if own and not acting:
                raise DagError(
                    f"{node}: rollout.agent.{key} = True without rollout.agent.env_path: there is no "
                    "environment. Set env_path: [file.py:Class]."
                )
            if own and deaf:
                raise DagError(
                    f"{node}: rollout.agent.{key} = True, but {deaf[0]!r}, which names the environment, "
                    f"leaves it false: an environment answers all agents of a conversation. Set {key} there."
                )


def _environment(node: NodeSpec, node_id: str, agent: AgentConfig, route: Any) -> NodeSpec:
    config = {
        "env_path": list(agent.env_path),
        "env_seed": agent.env_seed,
        "obs_with_env": agent.obs_with_env,
        "rewards_with_env": agent.rewards_with_env,
    }
    entry = {
        "node_id": node_id,
        "node_type": "ENV_INTERACT",
        "agent_group": node.agent_group,
        "dependencies": [node.node_id],
        "config": config,
        "loop": node.loop,
        "agent_options": None if route is None else {"route": route},
    }
    return node_spec(entry)
