"""Agents whose LoRA adapters stay apart: on the frozen base of another agent's model, or on their own. Pure.

An agent on its own base has `rollout.merge_lora: false`. One on another's has
`rollout.agent.share_instance: M`, an ACTOR node, and `model.lora_rank` above 0; so has agent M, less
`share_instance`. Without an ACTOR node `share_instance` means the whole policy: see
siirl/compiler/interactions/find.py.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from siirl.compiler.backends import ROLLOUT_BACKENDS, backend_of
from siirl.compiler.plan import ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes, Workflow
from siirl.config.common import ModelConfig
from siirl.config.resolve import get
from siirl.config.roles import ROLE_GROUPS
from siirl.errors import DagError
from siirl.models.adapter_targets import ADAPTED, expert_targets
from siirl.models.config_json import model_type_of
from siirl.models.families import family_of

MERGE = "actor_rollout_ref.rollout.merge_lora"
OWN_KEYS = ("lora_rank", "lora_alpha", "target_modules")
"""What an adapter has of its own; the rest of actor_rollout_ref.model describes the base."""


def check_bases(workflow: Workflow) -> None:
    """DagError for an adapter whose base is not there, is trained itself, or is of another model."""
    rollouts = workflow.rollouts
    trained = {node.agent for node in workflow.nodes.values() if node.op.trains_policy}
    for agent, owner in workflow.bases.items():
        node = rollouts[agent]
        key = f"{node}: rollout.agent.share_instance = {owner}"
        if owner not in rollouts:
            known = ", ".join(str(other) for other in rollouts if other != agent) or "none"
            raise DagError(
                f"{key}: no agent {owner} has a model on whose base agent {agent} could train its adapter. "
                f"Other agents with a rollout: {known}."
            )
        if rollouts[owner].shares is not None:
            raise DagError(
                f"{key}: agent {owner} uses the model of agent {rollouts[owner].shares} itself "
                f"({_chain(agent, rollouts)}): it has no base of its own. Name an agent without "
                "share_instance."
            )
        if owner not in trained or not rollouts[owner].lora_rank:
            rank, actorless = rollouts[owner].lora_rank, ", and it has no ACTOR node"
            raise DagError(
                f"{key}: agent {owner} trains no LoRA adapter (its model.lora_rank is {rank}"
                f"{'' if owner in trained else actorless}), and only weights that "
                "stay frozen can be shared. Set actor_rollout_ref.model.lora_rank for both "
                f"agents and train both, or unset share_instance: agent {agent} then has a copy of its own."
            )
        _check_same_base(key, node, rollouts[owner])
        for one in (node, rollouts[owner]):
            _check_layers(key, one, "unset share_instance")
    for agent in workflow.own_bases:
        if agent in rollouts:
            _check_alone(rollouts[agent])


def _check_alone(node: ResolvedNode) -> None:
    """DagError unless an engine can have the adapter of this agent beside its base."""
    key = f"{node}: {MERGE}=false"
    name = node.cfg.actor_rollout_ref.rollout.name
    engine = ROLLOUT_BACKENDS.get(name)
    if engine is not None and engine.weights and not engine.base_keys:
        able = ", ".join(other for other, backend in ROLLOUT_BACKENDS.items() if backend.base_keys)
        raise DagError(
            f"{key} with rollout.name={name}: this engine takes whole models alone. Set {MERGE}=true, or "
            f"rollout.name to one of {able}."
        )
    _check_layers(key, node, f"set {MERGE}=true")


def _check_same_base(key: str, node: ResolvedNode, owner: ResolvedNode) -> None:
    """DagError unless both describe the same base, and rollouts that one engine can do."""
    names = [item.name for item in dataclasses.fields(ModelConfig) if item.name not in OWN_KEYS]
    engine = ROLLOUT_BACKENDS.get(owner.cfg.actor_rollout_ref.rollout.name)
    compared = [f"actor_rollout_ref.model.{name}" for name in names]
    compared += [f"actor_rollout_ref.rollout.{name}" for name in (engine.base_keys if engine else ())]
    for name in compared:
        own, shared = get(node.cfg, name), get(owner.cfg, name)
        if own != shared:
            raise DagError(
                f"{key}, but {name} is {own} here and {shared} at {owner}: both use one base. Set it alike, "
                f"or unset share_instance. Adapters differ in model.{{{', '.join(OWN_KEYS)}}}."
            )


def _check_layers(key: str, node: ResolvedNode, fix: str) -> None:
    """DagError for adapters on layers that an engine does not have beside a base: no engine has experts, and
    vLLM has no layers with states."""
    model, kind = node.cfg.actor_rollout_ref.model, model_type_of(node.cfg.actor_rollout_ref.model)
    if family_of(kind).has_states and node.cfg.actor_rollout_ref.rollout.name == "vllm":
        raise DagError(
            f"{key} in vLLM, and {node} has a {kind}: it was not seen to compute adapters beside layers with "
            f"states, and on a CPU it does not. Set actor_rollout_ref.rollout.name=hf, or {fix}."
        )
    matrices = expert_targets(kind, model.target_modules)
    if matrices:
        raise DagError(
            f"{key}, and {node} has LoRA adapters on {', '.join(matrices)} of experts: adapters beside a "
            "base are on its attention only. Set actor_rollout_ref.model.target_modules="
            f"[{','.join(ADAPTED)}] for all agents on it, or {fix}."
        )


def with_bases(models: dict[str, ModelPlan], workflow: Workflow) -> dict[str, ModelPlan]:
    """The models, those on a shared base with its name, after the model that holds it.

    Models on other ranks than the base's, and references of other sizes or types, have a copy of their own.
    """
    found = dict(models)
    nodes = workflow.nodes
    bases = {agent: owner for agent, owner in workflow.bases.items() if workflow.rollouts[agent].model}
    owners = dict.fromkeys([*bases.values(), *workflow.own_bases])
    for agent, owner in [*bases.items(), *((owner, owner) for owner in owners)]:
        for role, source in (("actor", "actor"), ("ref", "actor"), ("rollout", "rollout")):
            model, base = found.get(f"agent_{agent}.{role}"), found.get(f"agent_{owner}.{source}")
            if model is not None and base is not None and _can_share(model, base, nodes):
                found[model.name] = replace(model, base=base.name)
    used = {model.base for model in found.values() if model.base not in (None, model.name)}
    used |= {f"agent_{agent}.rollout" for agent in workflow.own_bases}
    alone = [model.name for model in found.values() if model.base == model.name and model.name not in used]
    found |= {name: replace(found[name], base=None) for name in alone}
    for name, model in found.items():
        if model.is_rollout and model.base == name:
            on_it = {other.name: nodes[other.node] for other in found.values() if other.base == name}
            found[name] = replace(model, adapters={other: node.lora_rank for other, node in on_it.items()})
    return dict(sorted(found.items(), key=lambda item: item[1].base not in (None, item[0])))


def _can_share(model: ModelPlan, base: ModelPlan, nodes: Nodes) -> bool:
    """Whether a model can use the tensors of another: they are in the same processes, cut in the same way."""
    if model.ranks != base.ranks or model.backend != base.backend:
        return False
    if model.is_rollout or not backend_of(model).base_keys:
        return bool(backend_of(model).base_keys)
    mine, its = _cut(model, nodes), _cut(base, nodes)
    if mine == its:
        return True
    if model.is_policy:
        raise DagError(
            f"node {model.node!r} and node {base.node!r} train adapters on one base on the same ranks, but "
            f"with other values of actor.fsdp_config (fsdp_size, model_dtype: {mine[1:]} and {its[1:]}): one "
            "copy is cut in one way. Set the same for both."
        )
    return False


def _cut(model: ModelPlan, nodes: Nodes) -> tuple[Any, ...]:
    """How the weights of a model lie on its ranks."""
    node, group = nodes[model.node], ROLE_GROUPS[model.role]
    agreed = (node.value(f"{group}.{key}") for key in backend_of(model).base_keys)
    return model.dims.dp_replicate, model.dims.weight_shards, *agreed


def _chain(agent: int, rollouts: dict[int, ResolvedNode]) -> str:
    chain = [agent]
    while (after := rollouts[chain[-1]].shares) is not None:
        known = after in chain or after not in rollouts
        chain.append(after)
        if known:
            break
    return " -> ".join(map(str, chain))
