"""Which models have their layers compiled (model.compile_layers): those that were compared. No torch."""

from collections.abc import Mapping
from typing import Any

from siirl.config import Config
from siirl.config.roles import ROLE_GROUPS, ROLES, role_group, role_model

COMPILED = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models."""


def why_not_compiled(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why a role's model is not compiled as asked, and the fix; empty if it is, or is not to be."""
    model, group, keys = role_model(cfg, role), role_group(cfg, role), ROLES[role].model
    if not model.compile_layers:
        return ""
    what, fix = f"{keys}.compile_layers=True", f"Set {keys}.compile_layers=false"
    if group.strategy != "fsdp":
        return f"{what}: only layers under fsdp are compiled (parts of megatron's always are). {fix}."
    if config.get("model_type") not in COMPILED:
        usual = ", ".join(COMPILED)
        return (
            f"{what} for a {config.get('model_type')}, which was compared with nothing when compiled. {fix}, "
            f"or use a model of {usual}."
        )
    if model.use_liger:
        return (
            f"{what} with use_liger=True: the compiler does not look into Liger's kernels, and makes its own "
            f"in their place. {fix}, or {keys}.use_liger=false."
        )
    if group.fsdp_config.float8:
        return f"{what} with {ROLE_GROUPS[role]}.fsdp_config.float8=True: not seen together. {fix}."
    return ""
