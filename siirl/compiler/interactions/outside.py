"""Interactions whose episodes programs play (actor_rollout_ref.serve), and what refuses it. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from siirl.compiler.interactions.stages import rollout_cfg
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes
from siirl.config.serve import VERIFIERS, ServeConfig
from siirl.errors import DagError, NotSupportedError
from siirl.user_code.signatures import Call
from siirl.user_code.source import check_reference


def program_of(members: list[ResolvedNode], nodes: Nodes) -> dict[str, Any] | None:
    """What the entry of an interaction, its first member, says of a program that plays it, if there is one.

    DagError for members that say something else, or what has no meaning where a program decides.
    """
    entry, serve = members[0], members[0].cfg.actor_rollout_ref.serve
    programs = {node.id: node.cfg.actor_rollout_ref.serve for node in members if node.op.is_rollout}
    for node in members:
        if programs.get(node.id, serve) not in (serve, ServeConfig()):
            raise DagError(
                f"{node}: actor_rollout_ref.serve is {_set_keys(programs[node.id])} here and "
                f"{_set_keys(serve)} at {entry}, where its episodes begin: one program plays an episode, and "
                f"asks for the agents by the names of their nodes. Set it at {entry} alone."
            )
    if not serve.is_played:
        return None
    key = f"actor_rollout_ref.serve.{'listen' if serve.listen else 'command'}"
    for node in members:
        _check(node, key)
    agents = {node.agent for node in members}
    scored = any(
        key.name == "score" and key.agent in agents for node in nodes.values() for key in node.writes
    )
    for node in nodes.values():
        if node.op.credits and node.agent in agents:
            _check_credit(node, scored, key)
    if serve.sandbox is not None and serve.command == VERIFIERS:
        raise DagError(
            f"{entry}: actor_rollout_ref.serve.sandbox with serve.command=verifiers: such an environment "
            "brings its own place for commands, and its rewards. Leave the sandbox out."
        )
    if ":" in serve.tool_format:
        check_reference(serve.tool_format, f"{entry}: actor_rollout_ref.serve.tool_format", Call(("text",)))
    if serve.command and serve.is_function:
        check_reference(
            serve.command, f"{entry}: actor_rollout_ref.serve.command", Call(("session",), awaits=True)
        )
    return {
        "command": serve.command,
        "listen": serve.listen,
        "address": serve.address,
        "token_env": serve.token_env,
        "idle_s": serve.idle_s,
        "is_function": serve.is_function,
        "deadline_s": serve.deadline_s,
        "max_requests": serve.max_requests,
        "max_concurrent": serve.max_concurrent,
        "tool_format": serve.tool_format,
        "sandbox": serve.sandbox,
        "needs_reward": not scored and serve.sandbox is None,
    }


def _set_keys(serve: Any) -> Mapping[str, Any]:
    """The keys of a group that are not at their defaults."""
    return {
        item.name: getattr(serve, item.name)
        for item in dataclasses.fields(serve)
        if getattr(serve, item.name) != item.default
    }


def _check_credit(node: ResolvedNode, scored: bool, serving: str) -> None:
    """NotSupportedError where turns are looked at one by one: rows of a program's episode are no sequence.

    DagError if the program's rewards count for nothing, and there are no others (scored).
    """
    if not scored and not node.cfg.algorithm.credit.turn:
        raise DagError(
            f"{node}: algorithm.credit.turn = 0, the weight of what the program gives, and no reward node: "
            "nothing would be rewarded. Set it, or add a node with node_type COMPUTE, node_role REWARD."
        )
    by_turn = "turn" in node.cfg.algorithm.credit.group_by
    if by_turn or node.cfg.algorithm.estimator.by_turn:
        key = "algorithm.credit.group_by=[turn, ...]" if by_turn else "algorithm.adv_estimator"
        value = "" if by_turn else f"={node.cfg.algorithm.adv_estimator}"
        raise NotSupportedError(
            f"not supported yet: {node}: {key}{value} with {serving}: the turns of a "
            "program are in rows beside each other, each of which has the reward at its end. Compare rows: "
            "algorithm.adv_estimator=grpo without turn in credit.group_by."
        )


def _check(node: ResolvedNode, key: str) -> None:
    """DagError or NotSupportedError for what does not go with a program. key: that lets it play."""
    if node.op.is_environment:
        raise DagError(
            f"{node}: with {key} a program plays the episodes, and is their environment. Remove one of them."
        )
    agent, rollout = rollout_cfg(node).agent, rollout_cfg(node)
    decided = {
        "loop": node.spec.loop,
        "agent_options": node.spec.agent_options,
        "rollout.agent.process_path": agent.process_path,
        "rollout.multi_turn.enable": rollout.multi_turn.enable,
    }
    for name, value in decided.items():
        if value:
            raise DagError(
                f"{node}: {name} with {key}: the program decides who speaks, reads what, and calls which "
                "tools. Remove one of them."
            )
    if rollout.name == "openai":
        raise NotSupportedError(
            f"not supported yet: {node}: {key} with rollout.name=openai, a service that the program can ask "
            "itself. Leave the node out."
        )
    if rollout.max_lag:
        raise NotSupportedError(
            f"not supported yet: {node}: {key} with rollout.max_lag={rollout.max_lag}: a program cannot be "
            "interrupted between two steps. Set max_lag to 0."
        )
