"""Who learns from whom: what trainers read of the teachers above them, and what must hold between both.

A teacher may be a policy: an agent's own older weights, or those of another agent in training.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config import with_overrides
from siirl.config.resolve import COMPUTE_DTYPE, compute_dtype, get
from siirl.config.root import all_keys
from siirl.config.teacher import SAMPLED, WHOLE
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError

ROLE = "node_type MODEL_INFERENCE, node_role TEACHER"
NOT_TAKEN = ("lora_rank", "lora_alpha", "target_modules", "hf_hub_token")
"""Of the policy's model: adapters arrive merged, and a plan holds no secrets."""


def with_teachers(workflow: Workflow) -> Workflow:
    """The workflow, where trainers that learn from teachers read what these write, and teachers that are
    policies have their models."""
    workflow = with_their_models(workflow)
    nodes = workflow.nodes
    found = {node.id: _taught(node, teachers_of(node, workflow)) for node in nodes.values()}
    return replace(workflow, nodes=found)


def teachers_of(node: ResolvedNode, workflow: Workflow) -> list[ResolvedNode]:
    """The teachers that a trainer learns from: those of its agent above it, in the order of their nodes."""
    if not (node.op.trains_policy and node.cfg.actor_rollout_ref.actor.distills):
        return []
    above = workflow.graph.above[node.id]
    return [other for other in workflow.nodes.values() if other.id in above and is_teacher_of(other, node)]


def is_teacher_of(other: ResolvedNode, node: ResolvedNode) -> bool:
    """Whether a node is a teacher of another's agent."""
    return other.op.teaches and other.agent == node.agent


def _taught(node: ResolvedNode, teachers: list[ResolvedNode]) -> ResolvedNode:
    more = [key for teacher in teachers for key in teacher.writes]
    return replace(node, reads=(*node.reads, *more)) if more else node


def check_teachers(kept: Workflow, whole: Workflow) -> Iterator[UserError]:
    """Who learns has teachers above it, which say what its loss needs and leave nothing open between them."""
    for node in kept.nodes.values():
        actor = node.cfg.actor_rollout_ref.actor
        if not (node.op.trains_policy and actor.distills):
            continue
        teachers = teachers_of(node, kept)
        if not teachers:
            yield _none_above(node, whole)
        for teacher in teachers:
            if teacher.cfg.teacher.top_k != actor.distill.top_k:
                yield DagError(
                    f"{teacher} has teacher.top_k={teacher.cfg.teacher.top_k} and {node} has actor.distill."
                    f"top_k={actor.distill.top_k}: what a teacher says is what the loss reads. Set "
                    "actor.distill.top_k only: teachers follow it."
                )
            by = teacher.cfg.teacher.by
            if by != "data_source" and not by.startswith("extra_info."):
                yield ConfigError(
                    f"{teacher}: teacher.by={by}: expected data_source, or extra_info.NAME for a value "
                    "in the column extra_info."
                )
            if teacher.cfg.teacher.is_scored:
                yield from check_scored(teacher)
            if teacher.cfg.teacher.is_aligned:
                yield from check_aligned(teacher, node, kept)
            if is_policy(teacher):
                yield from () if teacher.cfg.teacher.is_scored else check_policy(teacher, kept)
            elif not (teacher.cfg.teacher.model.path or teacher.cfg.teacher.is_remote):
                yield ConfigError(
                    f"{teacher}: teacher.model.path is not set: the node has no model. Add config: "
                    "{model.path: DIRECTORY} to it; or {policy: N}: it is the policy of agent N."
                )
        yield from check_something_to_learn(node, teachers)
        if len({teacher.cfg.teacher.by for teacher in teachers if teacher.cfg.teacher.takes}) > 1:
            yield DagError(
                f"{node} learns from teachers that are chosen by different fields: "
                f"{', '.join(f'{t.id} by {t.cfg.teacher.by}' for t in teachers)}. Set teacher.by alike."
            )
        if actor.distill.top_k not in (SAMPLED, WHOLE) or any(x.cfg.teacher.is_aligned for x in teachers):
            yield from _check_apart(node, teachers, actor.distill.top_k)


def _none_above(node: ResolvedNode, workflow: Workflow) -> DagError:
    below = [other.id for other in workflow.nodes.values() if is_teacher_of(other, node)]
    fix = f"Add {below[0]!r} to its dependencies." if below else f"Add a node with {ROLE}, and depend on it."
    why = "loss_mode=distill" if node.cfg.actor_rollout_ref.actor.loss.distills else "distill.enable=true"
    return DagError(f"{node} has {why}, and no teacher above it. {fix} See docs/distillation.md.")


def _check_apart(node: ResolvedNode, teachers: list[ResolvedNode], top_k: int) -> Iterator[UserError]:
    """NotSupportedError where two teachers may take one row, and each says its own tokens only."""
    how, fix = f"distill.top_k={top_k}", "actor.distill.top_k=0 or -1"
    if any(teacher.cfg.teacher.is_aligned for teacher in teachers):
        how, fix = "teacher.tokenizer=own", "give both the policy's tokenizer"
    for one, other in itertools.combinations(teachers, 2):
        takes, others = set(one.cfg.teacher.takes), set(other.cfg.teacher.takes)
        if not takes or not others or takes & others:
            yield NotSupportedError(
                f"not supported yet: {one} and {other} take the same rows with {how}: a mixture needs each "
                f"one's log-probs of the other's tokens. Set teacher.takes so that each row of {node} has "
                f"one teacher, or {fix}."
            )
            return


OTHERWISE = "or teacher.strategy=fsdp (or megatron)"


def check_scored(teacher: ResolvedNode) -> Iterator[UserError]:
    """What is wrong with a teacher that a rollout engine scores for."""
    mine, rollout = teacher.cfg.teacher, teacher.cfg.actor_rollout_ref.rollout
    key = f"{teacher}: teacher.{f'endpoint.url={mine.endpoint.url}' if mine.is_remote else 'strategy=vllm'}"
    if not (mine.endpoint.url or "http://").startswith(("http://", "https://")):
        yield ConfigError(
            f"{key}: it must be the http(s) address of a service that gives log-probs of prompts, e.g. "
            "http://localhost:8000/v1/completions."
        )
    if rollout.trained_temperature != 1:
        yield NotSupportedError(
            f"not supported yet: {key} with actor_rollout_ref.rollout.temperature={rollout.temperature:g}: "
            "the policy is compared with its teacher at the temperature at which it samples, and engines "
            f"give the log-probs of tokens that are there at temperature 1. Set temperature=1, {OTHERWISE}."
        )
    if mine.top_k == WHOLE:
        yield NotSupportedError(
            f"not supported yet: {key} with actor.distill.top_k=-1: engines hand over each token's log-probs "
            "one by one, which takes longer than to compute them. Set distill.top_k=64 or so, "
            f"{OTHERWISE}."
        )
    if mine.policy is not None:
        yield NotSupportedError(
            f"not supported yet: {key} with teacher.policy={mine.policy}: older weights are averaged and "
            "kept in checkpoints by a training engine. Set teacher.strategy=fsdp (or megatron)."
        )
    if mine.model.lora_rank:
        yield ConfigError(
            f"{key} with teacher.model.lora_rank={mine.model.lora_rank}: a teacher is frozen, and a new "
            "adapter changes nothing. Leave it out; adapters that were trained are merged by `siirl export`."
        )


def check_aligned(teacher: ResolvedNode, node: ResolvedNode, kept: Workflow) -> Iterator[UserError]:
    """What is wrong with a teacher of another tokenizer, from which a node learns."""
    mine, actor = teacher.cfg.teacher, node.cfg.actor_rollout_ref.actor
    key = f"{teacher}: teacher.tokenizer=own"
    if mine.is_scored and not mine.is_remote:
        yield NotSupportedError(
            f"not supported yet: {key} with teacher.strategy={mine.strategy}: its engine has room for rows "
            "of the policy's tokens, and these are others. Set teacher.strategy=fsdp (or megatron), or serve "
            "the model: teacher.endpoint.url."
        )
    if mine.policy is not None:
        yield ConfigError(
            f"{key} with teacher.policy={mine.policy}: a policy has the policy's tokens. Remove the one or "
            "the other."
        )
    if mine.is_remote and not mine.model.path:
        yield ConfigError(
            f"{key} with teacher.endpoint.url={mine.endpoint.url}: its rows are tokenised here. Set "
            "teacher.model.path to the directory of its tokenizer."
        )
    if any(stage.agent == teacher.agent for talk in kept.interactions.values() for stage in talk.stages):
        yield NotSupportedError(
            f"not supported yet: {key} in an interaction: rows of several turns have marks between them that "
            "a tokenizer writes in its own way. Let agents speak once, or take another teacher."
        )
    corrects = actor.rollout_correction.weight != "none" or actor.tis_imp_ratio_cap > 0
    if actor.loss.distills and corrects:
        yield NotSupportedError(
            f"not supported yet: {key} with actor.rollout_correction.weight: it weighs tokens, and the loss "
            "is that of spans. Set actor.rollout_correction.weight=none, actor.tis_imp_ratio_cap=-1."
        )


def with_their_models(workflow: Workflow) -> Workflow:
    """The workflow, where a teacher that is a policy has the policy's model, and computes in its type."""
    return replace(workflow, nodes={node.id: _with_model(node, workflow) for node in workflow.nodes.values()})


def is_policy(node: ResolvedNode) -> bool:
    """Whether a node is a teacher that is a policy."""
    return node.op.teaches and node.cfg.teacher.policy is not None


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
