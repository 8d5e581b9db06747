"""What must hold for a model under fsdp: its ranks, its kernels, options that are handed to torch. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from siirl.compiler.checks.model_checks import attention_heads, check_trained_model
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.config.common import FLASH_4
from siirl.config.resolve import COMPUTE_DTYPE, get
from siirl.config.roles import ROLE_GROUPS, ROLES, role_group, role_model, trained_group
from siirl.errors import ConfigError, PlacementError, UserError, joined
from siirl.parallel.dims import ParallelDims


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


ADAMW: Mapping[str, Callable[[Any], bool]] = {"eps": _is_number, "fused": _is_switch, "foreach": _is_switch}
"""Argument of torch.optim.AdamW besides the keys of optim -> whether it takes a value."""
RECOMPUTATION: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("use_reentrant", "preserve_rng_state", "debug", "early_stop"), _is_switch),
    "determinism_check": ("default", "none").__contains__,
}
"""The same of torch.utils.checkpoint."""


def check_fsdp(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> None:
    """All that must hold for a model of a role under fsdp; raises UserError."""
    check_attention_kernels(cfg, role, node)
    _check_sequence_ranks(cfg, role, dims, node)
    _check_expert_ranks(role, dims, node)
    check_trained_model(cfg, role, str(node))
    if problems := [*_options(cfg, role, node)]:
        raise joined(problems)


def _check_sequence_ranks(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> None:
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
            raise PlacementError(
                f"{node}: {key}={dims.cp} does not divide {what}: the ranks that share a sequence share its "
                f"model's weights, too. Set {key} to {' or '.join(map(str, fits))}."
            )


def _check_expert_ranks(role: str, dims: ParallelDims, node: ResolvedNode) -> None:
    """PlacementError unless experts are whole on each rank, or sharded over one copy of all weights."""
    if dims.ep in (1, dims.weight_shards):
        return
    key = f"{ROLE_GROUPS[role]}.fsdp_config.expert_parallel_size"
    raise PlacementError(
        f"{node}: {key}={dims.ep}, and {dims.weight_shards} ranks share one copy of the weights: either all "
        f"of them have some of the experts, or each gathers all. "
        f"Set it to {' or '.join(map(str, sorted({1, dims.weight_shards})))}."
    )


def check_attention_kernels(cfg: Config, role: str, node: ResolvedNode, others: str = "") -> None:
    """ConfigError for attention kernels that would not be used by a role's model.

    others: why its backend has others, if it has.
    """
    model, strategy = role_model(cfg, role), role_group(cfg, role).strategy
    if model.attention_kernels != FLASH_4:
        return
    key = f"{ROLE_GROUPS[role]}.{COMPUTE_DTYPE[strategy]}"
    if cfg.trainer.device == "cpu":
        problem = "trainer.device=cpu: it is for GPUs."
    elif (dtype := get(cfg, key)) != "bfloat16":
        problem = f"{key}={dtype}: it computes in bfloat16."
    else:
        problem = others
    if problem:
        raise ConfigError(
            f"{node}: {ROLES[role].model}.attention_kernels={FLASH_4}: {problem} Set it to torch."
        )


def _options(cfg: Config, role: str, node: ResolvedNode) -> Iterator[UserError]:
    """Options of AdamW and of recomputation: what the engine, or torch in the first update, would refuse."""
    if not node.op.trains:
        return
    key, model = f"{ROLES[role].trainer}.optim.override_optimizer_config", role_model(cfg, role)
    options = trained_group(cfg, role).optim.override_optimizer_config or {}
    yield from _unlike(node, key, options, ADAMW)
    if options.get("fused") and options.get("foreach"):
        yield ConfigError(f"{node}: {key} has fused and foreach, which are two ways. Remove one of them.")
    if model.enable_gradient_checkpointing:
        key = f"{ROLES[role].model}.gradient_checkpointing_kwargs"
        yield from _unlike(node, key, model.gradient_checkpointing_kwargs, RECOMPUTATION)


def _unlike(
    node: ResolvedNode, key: str, options: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]]
) -> Iterator[UserError]:
    for name, value in options.items():
        if name not in known:
            yield ConfigError(f"{node}: {key} has {name}: it takes {', '.join(known)}. Remove it.")
        elif not known[name](value):
            yield ConfigError(f"{node}: {key}.{name}={value} is no value of it. Correct it, or leave it out.")
