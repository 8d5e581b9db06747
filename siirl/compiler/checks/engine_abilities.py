"""What a workflow asks of its engines and not all of them can do. Pure.

Images, chosen experts, FP8, weights in place.
"""

from collections.abc import Iterator, Mapping

from siirl.compiler.backends import ROLLOUT_BACKENDS, TRAIN_BACKENDS, backend_of
from siirl.compiler.backends.base import NO_EXPERTS
from siirl.compiler.backends.vllm import KEY, why_by_loaders
from siirl.compiler.plan import ModelPlan, Plan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config import Config
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError
from siirl.models.config_json import as_built, model_type_of
from siirl.models.families import family_of
from siirl.models.sizes import router_choices
from siirl.types import EXPERT_FIELDS, IMAGE_FIELDS

OFF = "Set actor_rollout_ref.actor.router_replay.mode=disabled"


def check_images(kept: Workflow) -> Iterator[UserError]:
    """The nodes agree on the kind of dataset, and their rollouts take its images."""
    kind = kept.run.data.dataset_type
    for node in kept.nodes.values():
        if node.cfg.data.dataset_type != kind:
            yield DagError(
                f"{node} has data.dataset_type={node.cfg.data.dataset_type} and the run {kind}: one loader "
                "reads the prompts of all nodes. Set it on the command line."
            )
        elif node.op.is_rollout and node.cfg.data.has_images:
            yield from _of_a_rollout(node)
        elif node.cfg.data.has_images and (problem := _why_blind(node)):
            yield NotSupportedError(
                f"not supported yet: {node}: prompts with images (data.dataset_type=vlm): {problem}"
            )


def _why_blind(node: ResolvedNode) -> str:
    """Why a node whose model computes on prompts that have images is not given them, and the fix."""
    names, role = {key.name for key in node.reads}, node.op.role
    if node.op.teaches and (role is None or role.generates):
        return (
            "a teacher in a rollout engine, or behind a service, is given tokens alone. Set "
            "teacher.strategy=fsdp."
        )
    if node.op.teaches and node.cfg.teacher.is_aligned:
        return "a teacher with a tokenizer of its own reads texts alone. Leave out teacher.tokenizer."
    missing = [name for name in IMAGE_FIELDS if name not in names]
    if role and not role.generates and node.spec.executable_ref and "prompt_ids" in names and missing:
        return f"its code gives its model tokens without {' and '.join(missing)}. Add them to its reads."
    return ""


def _of_a_rollout(node: ResolvedNode) -> Iterator[UserError]:
    images = f"not supported yet: {node}: images in prompts (data.dataset_type=vlm)"
    rollout = node.cfg.actor_rollout_ref.rollout
    taking = [name for name, backend in ROLLOUT_BACKENDS.items() if backend.takes_images]
    if node.op.gives_data:
        yield NotSupportedError(
            f"{images} with rollout.name={rollout.name}: SFT, DPO and what else trains on responses "
            "of a dataset have texts alone. Remove the images, or let the policy sample by rollout.name=vllm."
        )
    elif rollout.name not in taking:
        yield NotSupportedError(
            f"{images} with rollout.name={rollout.name}, which is given tokens alone. Set rollout.name to "
            f"{' or '.join(taking)}."
        )
    elif node.cfg.trainer.device != "cpu" and rollout.tensor_model_parallel_size > 1:
        yield NotSupportedError(
            f"{images} with rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: engines "
            "of several ranks were seen to read images on CPUs alone. Set "
            f"{KEY}.tensor_model_parallel_size=1."
        )


def check_router_replay(kept: Workflow) -> Iterator[UserError]:
    """The policy's experts can be replayed, and its rollout says which they are."""
    for node in kept.nodes.values():
        actor = node.cfg.actor_rollout_ref.actor
        mode = f"not supported yet: {node}: actor.router_replay.mode={actor.router_replay.mode}"
        if actor.router_replay.mode == "disabled":
            continue
        problem = ""
        if node.op.trains_policy:
            problem = _trainer_without_experts(node)
        elif node.op.gives_data or any(
            key.name in EXPERT_FIELDS for key in node.writes if node.op.is_rollout
        ):
            problem = _rollout_without_experts(node)
        if problem:
            yield NotSupportedError(f"{mode} {problem}")


def _trainer_without_experts(node: ResolvedNode) -> str:
    actor, model = node.cfg.actor_rollout_ref.actor, node.cfg.actor_rollout_ref.model
    if problem := TRAIN_BACKENDS[actor.strategy].no_replay(actor):
        return problem
    config = as_built(model)
    if "num_hidden_layers" not in config:
        return ""  # said by others
    choices, kind = router_choices(config), config.get("model_type")
    experts = family_of(kind).experts
    if choices is None:
        return f"for a {kind} without experts, or with other numbers of them in each layer. {OFF}."
    if experts is None or not experts.replayed:
        return f"for a {kind}, whose router was not seen to take given experts. {OFF}."
    return ""


def _rollout_without_experts(node: ResolvedNode) -> str:
    name = node.cfg.actor_rollout_ref.rollout.name
    problems = {other: backend.no_experts(node.cfg) for other, backend in ROLLOUT_BACKENDS.items()}
    problem = problems.get(name, NO_EXPERTS)
    saying = " or ".join(other for other, why in problems.items() if not why)
    return f"with rollout.name={name}: {problem}. {OFF}, or rollout.name={saying}." if problem else ""


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
        if problem := _why_not_rounded(node, shares):
            yield NotSupportedError(
                f"not supported yet: {node}: {KEY}.quantization={rollout.quantization} {problem}. Set "
                f"{KEY}.quantization=null."
            )


def _why_not_rounded(node: ResolvedNode, shares_base: bool) -> str:
    model, rollout = node.cfg.actor_rollout_ref.model, node.cfg.actor_rollout_ref.rollout
    kind = model_type_of(model)
    if kind and not family_of(kind).float8:
        return f"for a {kind}: only models without experts, images and compressed keys were seen in it"
    if shares_base:
        return "for adapters that are not merged: one beside rounded weights was compared with nothing"
    if "quantization" in rollout.engine_kwargs.vllm:
        return "and engine_kwargs.vllm.quantization both say how weights are rounded"
    return ""


def check_weights_in_place(plan: Plan, configs: Mapping[str, Config]) -> Iterator[NotSupportedError]:
    """Engines that are asked to write weights in place and cannot, or were not seen to."""
    for model in plan.models.values():
        cfg = configs[model.node]
        way = cfg.actor_rollout_ref.rollout.replace_weights
        if model.is_rollout and way not in ("auto", "by_loaders") and (why := _why_by_loaders(model, cfg)):
            yield NotSupportedError(
                f"not supported yet: node {model.node!r}: {KEY}.replace_weights={way} {why}. Set "
                f"{KEY}.replace_weights=by_loaders."
            )


def _why_by_loaders(model: ModelPlan, cfg: Config) -> str:
    if not backend_of(model).writes_in_place:
        return f"with rollout.name={cfg.actor_rollout_ref.rollout.name}: it takes weights in its own way"
    return why_by_loaders(model, cfg)
