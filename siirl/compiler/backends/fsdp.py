"""FSDP2: what a model under strategy=fsdp gets, and what must hold of its ranks and options. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from siirl.compiler.backends.base import ASKED, Backend, balances
from siirl.compiler.checks.model_checks import (
    attention_heads,
    check_attention_kernels,
    check_model_of_node,
)
from siirl.compiler.memory.estimate import MemoryLine, ModelShape, fsdp_lines
from siirl.compiler.plan import ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.config.actor import ActorConfig
from siirl.config.common import ModelConfig
from siirl.config.roles import ROLE_GROUPS, ROLES, role_group, role_model, sequence_ranks, trained_group
from siirl.errors import ConfigError, NotSupportedError, PlacementError, UserError
from siirl.findings import Check
from siirl.models.config_json import as_built
from siirl.models.families import family_of
from siirl.models.sizes import num_experts
from siirl.parallel.dims import ParallelDims
from siirl.parallel.placement import Ranks


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


ADAMW: Mapping[str, Callable[[Any], bool]] = {"eps": _is_number, "fused": _is_switch, "foreach": _is_switch}
"""Argument of torch.optim.AdamW besides the keys of optim -> whether it takes a value."""
MUON: Mapping[str, Callable[[Any], bool]] = {
    "momentum": lambda value: _is_number(value) and value < 1,
    "nesterov": _is_switch,
    "ns_steps": lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 < value < 100,
    "ns_dtype": ("float32", "bfloat16").__contains__,
}
"""The same of Muon, which takes AdamW's, too, for what is no matrix."""
RECOMPUTATION: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("use_reentrant", "preserve_rng_state", "debug", "early_stop"), _is_switch),
    "determinism_check": ("default", "none").__contains__,
}
"""The same of torch.utils.checkpoint."""


def check_sequence_ranks(
    cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode
) -> Iterator[UserError]:
    """PlacementError where the ranks that share a sequence do not divide those that share weights, or all."""
    group, size = ROLE_GROUPS[role], role_group(cfg, role).fsdp_config.fsdp_size
    key = f"{group}.ulysses_sequence_parallel_size"
    for ranks, what in (
        (dims.world, f"its {dims.world} ranks"),
        (size, f"{group}.fsdp_config.fsdp_size={size}"),
    ):
        if 0 < ranks <= dims.world and ranks % dims.cp:
            whole = (dims.world, ranks, attention_heads(cfg, role))
            fits = [n for n in range(1, dims.cp) if not any(number % n for number in whole)]
            yield PlacementError(
                f"{node}: {key}={dims.cp} does not divide {what}: the ranks that share a sequence share its "
                f"model's weights, too. Set {key} to {' or '.join(map(str, fits))}."
            )


def check_expert_ranks(role: str, dims: ParallelDims, node: ResolvedNode) -> Iterator[UserError]:
    """PlacementError unless experts are whole on each rank, or sharded over one copy of all weights."""
    key = f"{ROLE_GROUPS[role]}.fsdp_config.expert_parallel_size"
    if dims.ep not in (1, dims.weight_shards):
        yield PlacementError(
            f"{node}: {key}={dims.ep}, and {dims.weight_shards} ranks share one copy of the weights: either "
            f"all of them have some of the experts, or each gathers all. "
            f"Set it to {' or '.join(map(str, sorted({1, dims.weight_shards})))}."
        )


def check_options(cfg: Config, role: str, node: ResolvedNode) -> Iterator[UserError]:
    """Options of AdamW and of recomputation: what the engine, or torch in the first update, would refuse."""
    if not node.op.trains:
        return
    key, model = f"{ROLES[role].trainer}.optim.override_optimizer_config", role_model(cfg, role)
    optim = trained_group(cfg, role).optim
    options = optim.override_optimizer_config or {}
    yield from _unlike(node, key, options, {**ADAMW, **(MUON if optim.name == "muon" else {})})
    if optim.name == "muon" and (lacks := _not_of_muon(model)):
        yield NotSupportedError(
            f"{node}: {ROLES[role].trainer}.optim.name=muon with {lacks}. Set it to adamw."
        )
    if options.get("fused") and options.get("foreach"):
        yield ConfigError(f"{node}: {key} has fused and foreach, which are two ways. Remove one of them.")
    if model.enable_gradient_checkpointing:
        key = f"{ROLES[role].model}.gradient_checkpointing_kwargs"
        yield from _unlike(node, key, model.gradient_checkpointing_kwargs, RECOMPUTATION)


def _not_of_muon(model: ModelConfig) -> str:
    """What of a model Muon was not seen to train; empty if it does."""
    built = as_built(model)
    if model.lora_rank:
        return f"lora_rank={model.lora_rank}: it makes updates of whole matrices orthogonal, not of factors"
    if num_experts(built):
        return f"{num_experts(built)} experts in a layer, whose matrices lie in one tensor"
    if family_of(built.get("model_type")).sees_images:
        return f"a {built['model_type']}, whose vision tower it was not seen to train"
    return ""


def _unlike(
    node: ResolvedNode, key: str, options: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]]
) -> Iterator[UserError]:
    for name, value in options.items():
        if name not in known:
            yield ConfigError(f"{node}: {key} has {name}: it takes {', '.join(known)}. Remove it.")
        elif not known[name](value):
            yield ConfigError(f"{node}: {key}.{name}={value} is no value of it. Correct it, or leave it out.")


class FSDP(Backend):
    """Weights are sharded, and gathered layer by layer."""

    checks = (
        Check("model", ("cfg", "role", "node"), check_attention_kernels),
        Check("model", ASKED, check_sequence_ranks),
        Check("model", ("role", "dims", "node"), check_expert_ranks),
        Check("model", ("cfg", "role", "node"), check_model_of_node),
        Check("model", ("cfg", "role", "node"), check_options),
    )
    gathers_weights = layers_by_keys = shares_prompts = kernels_of_parts = True
    base_keys = ("fsdp_config.model_dtype", "fsdp_config.expert_parallel_size")
    offloads = ("fsdp_config.param_offload",)
    offloads_trained = ("fsdp_config.optimizer_offload",)

    def dims(self, cfg: Config, role: str, world: int) -> ParallelDims:
        """The ranks of a sequence share its model's weights, with as many others as fsdp_size says."""
        size, sequence = role_group(cfg, role).fsdp_config.fsdp_size, sequence_ranks(cfg, role)
        shard = world if size < 1 or size > world else size
        copies, experts = -(-world // shard), role_group(cfg, role).fsdp_config.expert_parallel_size
        return ParallelDims(
            world, cp=sequence, ep=experts, dp_shard=max(1, shard // sequence), dp_replicate=copies
        )

    def memory(self, model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
        return fsdp_lines(model, cfg, shape, rows)

    def groups(self, dims: ParallelDims, ranks: Ranks) -> Iterable[Ranks]:
        return [group for groups in dims.fsdp_groups(ranks).values() for group in groups]

    def no_replay(self, actor: ActorConfig) -> str:
        weight = actor.fsdp_config.moe_aux_loss_coeff
        return balances(f"fsdp_config.moe_aux_loss_coeff={weight}") if weight else ""
