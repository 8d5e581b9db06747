"""Who learns from whom: what trainers read of the teachers above them, and what must hold between both."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from siirl.compiler.older_policies import (
    check_policy,
    check_something_to_learn,
    is_policy,
    with_their_models,
)
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config.teacher import SAMPLED, WHOLE
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError

ROLE = "node_type MODEL_INFERENCE, node_role TEACHER"


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
    return other.op.role is not None and other.op.role.is_teacher and other.agent == node.agent


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
            if is_policy(teacher):
                yield from () if teacher.cfg.teacher.is_scored else check_policy(teacher, kept)
            elif not teacher.cfg.teacher.model.path:
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
        if actor.distill.top_k not in (SAMPLED, WHOLE):
            yield from _check_apart(node, teachers, actor.distill.top_k)


def _none_above(node: ResolvedNode, workflow: Workflow) -> DagError:
    below = [other.id for other in workflow.nodes.values() if is_teacher_of(other, node)]
    fix = f"Add {below[0]!r} to its dependencies." if below else f"Add a node with {ROLE}, and depend on it."
    why = "loss_mode=distill" if node.cfg.actor_rollout_ref.actor.loss.distills else "distill.enable=true"
    return DagError(f"{node} has {why}, and no teacher above it. {fix} See docs/distillation.md.")


def _check_apart(node: ResolvedNode, teachers: list[ResolvedNode], top_k: int) -> Iterator[UserError]:
    """NotSupportedError where two teachers may take one row, and each says its own tokens only."""
    for one, other in itertools.combinations(teachers, 2):
        takes, others = set(one.cfg.teacher.takes), set(other.cfg.teacher.takes)
        if not takes or not others or takes & others:
            yield NotSupportedError(
                f"not supported yet: {one} and {other} take the same rows with distill.top_k={top_k}: a "
                "mixture needs each one's log-probs of the other's tokens. Set teacher.takes so that each "
                f"row of {node} has one teacher, or actor.distill.top_k=0 or -1."
            )
            return


OTHERWISE = "or teacher.strategy=fsdp (or megatron)"


def check_scored(teacher: ResolvedNode) -> Iterator[UserError]:
    """What is wrong with a teacher that a rollout engine scores for."""
    mine, rollout = teacher.cfg.teacher, teacher.cfg.actor_rollout_ref.rollout
    key = f"{teacher}: teacher.strategy={mine.strategy}"
    if rollout.trained_temperature != 1:
        yield NotSupportedError(
            f"not supported yet: {key} with actor_rollout_ref.rollout.temperature={rollout.temperature:g}: "
            "the policy is compared with its teacher at the temperature at which it samples, and vLLM gives "
            f"the log-probs of tokens that are there at temperature 1. Set temperature=1, {OTHERWISE}."
        )
    if mine.top_k == WHOLE:
        yield NotSupportedError(
            f"not supported yet: {key} with actor.distill.top_k=-1: vLLM hands over each token's log-probs "
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
