"""Teachers that are policies: an agent's own older weights, or those of another agent in training."""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config import with_overrides
from siirl.config.resolve import COMPUTE_DTYPE, compute_dtype, get
from siirl.config.root import all_keys
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError

NOT_TAKEN = ("lora_rank", "lora_alpha", "target_modules", "hf_hub_token")
"""Of the policy's model: adapters arrive merged, and a plan holds no secrets."""


def with_their_models(workflow: Workflow) -> Workflow:
    """The workflow, where a teacher that is a policy has the policy's model, and computes in its type."""
    return replace(workflow, nodes={node.id: _with_model(node, workflow) for node in workflow.nodes.values()})


def is_policy(node: ResolvedNode) -> bool:
    """Whether a node is a teacher that is a policy."""
    return node.op.role is not None and node.op.role.is_teacher and node.cfg.teacher.policy is not None


def _with_model(node: ResolvedNode, workflow: Workflow) -> ResolvedNode:
    trainer = _trainer(node, workflow) if is_policy(node) and not node.cfg.teacher.is_scored else None
    if trainer is None:
        return node
    mine, its = node.cfg.teacher, trainer.cfg.actor_rollout_ref.model
    names = {item.name for item in dataclasses.fields(its)}.difference(NOT_TAKEN)
    changed: dict[str, Any] = {
        f"teacher.model.{name}": getattr(its, name)
        for name in sorted(names)
        if getattr(its, name) != getattr(mine.model, name)
    }
    if mine.model.path:
        del changed["teacher.model.path"]
    key, dtype = f"teacher.{COMPUTE_DTYPE[mine.strategy]}", compute_dtype(trainer.cfg, "actor")
    if key not in node.cfg.explicit and dtype in all_keys()[key].rule.choices:
        changed[key] = dtype
    return replace(node, cfg=with_overrides(node.cfg, changed), overrides=node.overrides | changed)


def _trainer(node: ResolvedNode, workflow: Workflow) -> ResolvedNode | None:
    """The node that trains the policy that a teacher is, if there is one."""
    model = f"agent_{node.cfg.teacher.policy}.actor"
    found = (other for other in workflow.nodes.values() if other.op.trains_policy and other.model == model)
    return next(found, None)


def check_policy(teacher: ResolvedNode, kept: Workflow) -> Iterator[UserError]:
    """What is wrong with a teacher that is a policy."""
    mine, trainer = teacher.cfg.teacher, _trainer(teacher, kept)
    key = f"{teacher}: teacher.policy={mine.policy}"
    if trainer is None:
        yield DagError(
            f"{key}: no node trains the policy of agent {mine.policy}, so it has no older weights. Set "
            "teacher.policy to an agent in training, or teacher.model.path to the directory of a model."
        )
        return
    path = trainer.cfg.actor_rollout_ref.model.path
    if mine.model.path != path:
        yield ConfigError(
            f"{key} with teacher.model.path={mine.model.path}: it begins as the model of agent "
            f"{mine.policy}, {path}, and takes its weights. Leave out teacher.model.path."
        )
    dtypes = {"fsdp": "fsdp_config.model_dtype", "megatron": "megatron.param_dtype"}
    held = f"teacher.{dtypes[mine.strategy]}"
    if mine.update_rate < 1 and get(teacher.cfg, held) != "float32":
        yield NotSupportedError(
            f"not supported yet: {key} with teacher.update_rate={mine.update_rate:g} and {held}="
            f"{get(teacher.cfg, held)}: steps of a moving average are smaller than what that type can tell "
            f"apart, so the teacher would stand still. Set {held}=float32"
            + ("." if mine.strategy == "fsdp" else ", or teacher.strategy=fsdp.")
        )
    if mine.policy == teacher.agent and (mine.sync_steps, mine.update_rate) == (1, 1):
        yield DagError(
            f"{key} with teacher.sync_steps=1 and teacher.update_rate=1: it is the policy that learns from "
            "it, as it was when the step began, so there is nothing to learn. Set teacher.sync_steps=N for a "
            "copy that is up to N steps old, or teacher.update_rate=0.05 or so for a moving average."
        )


def check_something_to_learn(node: ResolvedNode, teachers: list[ResolvedNode]) -> Iterator[UserError]:
    """DagError where the loss is the divergence from the policy's own older weights, and nothing else.

    node: a trainer; teachers: its own.
    """
    own = [teacher for teacher in teachers if teacher.cfg.teacher.policy == node.agent]
    if node.cfg.actor_rollout_ref.actor.loss.distills and own and own == teachers:
        yield DagError(
            f"{node} learns from its own older weights alone ({', '.join(teacher.id for teacher in own)}): "
            "they begin as its own, where the loss is least: nothing ever changes. Learn from rewards, too "
            "(another policy_loss.loss_mode, actor.distill.enable=true), or from another teacher."
        )
