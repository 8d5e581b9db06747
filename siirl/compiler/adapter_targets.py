"""Which parts of a model may have LoRA adapters, those of a mixture of experts above all. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from siirl.config.common import ModelConfig

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""What may have them in any mixture of experts."""
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
EXPERT_MATRICES = {
    "flex_olmo": _GATE_UP_DOWN,
    "mellum": _GATE_UP_DOWN,
    "mixtral": ("w1", "w3", "w2"),
    "olmoe": _GATE_UP_DOWN,
    "qwen3_moe": _GATE_UP_DOWN,
}
"""Model type -> what the files call the gate, up and down matrix of an expert, where adapters are put on
them, too: types without an expert for all tokens, of whose adapters peft would lose a part."""
TURNED = ("gpt2",)
"""Whose matrices are stored as [in, out], so that adapters do not merge into them as into others."""
DENSE_LAYERS = ("mlp_only_layers", "first_k_dense_replace")
"""Names in config.json by which some layers have no experts."""


def expert_targets(kind: str | None, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Which matrices of experts get LoRA adapters, by their names in the files; gate and up go together.

    targets: model.target_modules.
    """
    known = EXPERT_MATRICES.get(kind or "", ())
    if isinstance(targets, str):
        return known if targets == "all-linear" else ()
    return tuple(name for name in known if name in targets)


def why_not_adapted(config: Mapping[str, Any], model: ModelConfig, keys: str, has_experts: bool) -> str:
    """Why a model does not get the adapters asked for, and the fix; empty if it does."""
    targets, kind = model.target_modules, config.get("model_type")
    if not model.lora_rank:
        return ""
    if kind in TURNED:
        return f"LoRA adapters of a {kind}, whose matrices are stored as [in, out]. Set {keys}.lora_rank=0."
    if not has_experts or (not isinstance(targets, str) and set(targets) <= set(ADAPTED)):
        return ""
    asked = f"LoRA adapters on experts ({keys}.target_modules={targets})"
    fix = f"Set {keys}.target_modules=[{','.join(ADAPTED)}], or lora_rank=0."
    matrices = EXPERT_MATRICES.get(kind or "", ())
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
