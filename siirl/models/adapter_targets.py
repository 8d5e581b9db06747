"""Which parts of a model may have LoRA adapters, those of a mixture of experts above all. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from siirl.models.families import family_of
from siirl.models.sizes import DENSE_LAYERS, num_experts

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""What may have them in any mixture of experts."""


def expert_matrices(model_type: str | None) -> tuple[str, ...]:
    """The matrices of an expert that may have adapters: gate, up and down, as the files call them."""
    experts = family_of(model_type).experts
    return experts.matrices if experts is not None and experts.adapted else ()


def expert_targets(model_type: str | None, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Which matrices of experts get LoRA adapters, by their names in the files; gate and up go together.

    targets: model.target_modules.
    """
    known = expert_matrices(model_type)
    if isinstance(targets, str):
        return known if targets == "all-linear" else ()
    return tuple(name for name in known if name in targets)


def why_not_adapted(config: Mapping[str, Any], targets: str | Sequence[str], keys: str) -> str:
    """Why a model does not get the adapters that are asked for, and the fix; empty if it does.

    keys: the group of the model in the configuration.
    """
    kind = config.get("model_type")
    if family_of(kind).turned:
        return f"LoRA adapters of a {kind}, whose matrices are stored as [in, out]. Set {keys}.lora_rank=0."
    if not num_experts(config) or (not isinstance(targets, str) and set(targets) <= set(ADAPTED)):
        return ""
    asked = f"LoRA adapters on experts ({keys}.target_modules={targets})"
    fix = f"Set {keys}.target_modules=[{','.join(ADAPTED)}], or lora_rank=0."
    matrices = expert_matrices(kind)
    if not matrices:
        return f"{asked} of a {kind}: it has them on its attention only. {fix}"
    if config.get("decoder_sparse_step", 1) != 1 or any(config.get(name) for name in DENSE_LAYERS):
        return (
            f"{asked} of a {kind} some of whose layers have none: peft would lose the adapters of these. "
            f"{fix}"
        )
    if targets == "all-linear":
        return ""
    unknown = [name for name in targets if name not in (*ADAPTED, *matrices)]
    if isinstance(targets, str) or unknown:
        return f"{asked}: a {kind} has {', '.join((*ADAPTED, *matrices))}. Name some of these, or all-linear."
    gate, up, _ = matrices
    if (gate in targets) != (up in targets):
        return f"{asked}: {gate} and {up} of an expert are adapted together. Name both, or none."
    return ""
