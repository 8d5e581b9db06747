"""Rollout engines in FP8 (rollout.quantization), and the bound for what it changes. Pure."""

from collections.abc import Iterator

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.errors import ConfigError, NotSupportedError, UserError
from siirl.models.config_json import model_type_of
from siirl.models.families import family_of

KEY = "actor_rollout_ref.rollout"


def check_log_prob_bound(kept: Workflow) -> Iterator[UserError]:
    """ConfigError where a bound is set for log-probs that nobody compares."""
    for node in kept.nodes.values():
        actor, bound = node.cfg.actor_rollout_ref.actor, node.cfg.actor_rollout_ref.rollout.max_log_prob_diff
        if node.op.trains_policy and bound is not None and (actor.imitates or actor.loss.pairs):
            yield ConfigError(
                f"{node}: {KEY}.max_log_prob_diff={bound:g} with actor.policy_loss.loss_mode="
                f"{actor.loss_name}, which reads no log-probs of a rollout engine: there is nothing to "
                f"compare. Set {KEY}.max_log_prob_diff=null (and quantization=null)."
            )


def check_quantized(kept: Workflow) -> Iterator[UserError]:
    """Models whose weights vLLM was not seen to round in each sync."""
    for node in kept.nodes.values():
        rollout = node.cfg.actor_rollout_ref.rollout
        if not node.op.is_rollout or rollout.name != "vllm" or not rollout.quantization:
            continue
        shares = node.agent in {*kept.bases, *kept.bases.values(), *kept.own_bases}
        if problem := _problem(node, shares):
            yield NotSupportedError(
                f"not supported yet: {node}: {KEY}.quantization={rollout.quantization} {problem}. Set "
                f"{KEY}.quantization=null."
            )


def _problem(node: ResolvedNode, shares_base: bool) -> str:
    model, rollout = node.cfg.actor_rollout_ref.model, node.cfg.actor_rollout_ref.rollout
    kind = model_type_of(model)
    if kind and not family_of(kind).float8:
        return f"for a {kind}: only models without experts, images and compressed keys were seen in it"
    if shares_base:
        return "for adapters that are not merged: one beside rounded weights was compared with nothing"
    if "quantization" in rollout.engine_kwargs.vllm:
        return "and engine_kwargs.vllm.quantization both say how weights are rounded"
    return ""
