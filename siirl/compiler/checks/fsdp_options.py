"""Options of AdamW and of recomputation under fsdp, which are handed on: those that there are. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.config.roles import ROLES, role_model, trained_group
from siirl.errors import ConfigError, UserError


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


def check_fsdp_options(cfg: Config, role: str, node: ResolvedNode) -> Iterator[UserError]:
    """What the engine, or torch in the first update, would refuse."""
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
