"""Parameters of the parts of a layer, from a model's config.json. Pure."""

from collections.abc import Mapping
from typing import Any

from siirl.compiler.model_types import EXPERTS, GROUP_ROUTED

ONLY_EXPERTS = ("mixtral", "olmoe", "gpt_oss")
"""Families whose layers all have experts, of the width that dense MLPs have in others."""
BIASED = ("gpt_oss",)
"""Families whose experts and routers have biases."""
FUSED = ("glm4", "phi3")
"""Families whose files have gate and up in one tensor; phi3's queries, keys and values too."""
FOUR_NORMS = ("glm4", "gemma3_text")
"""Families whose layers norm what attention and MLP give, too."""
QK_NORMS = ("olmoe", "gemma3_text")
"""Families whose queries and keys have norms, besides the Qwen3 ones."""


def latent_sizes(raw: Mapping[str, Any]) -> dict[str, int]:
    """Of attention whose keys and values, maybe queries too, are made of compressed ones.

    params: its weights; kv_width: the mean of what keys and values have; others are fields of ModelShape.
    """
    hidden, heads, of_kv, of_q = (
        raw[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, turned, value = (raw[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = heads * (plain + turned)
    params = hidden * (of_kv + turned) + of_kv + of_kv * heads * (plain + value) + heads * value * hidden
    params += queries * hidden if of_q is None else hidden * of_q + of_q + of_q * queries
    width = heads * (plain + turned + value) // 2
    return {
        "params": params,
        "kv_width": width,
        "compressed": (of_q or 0) + of_kv + turned,
        "cached": of_kv + turned,
    }


def experts_of(raw: Mapping[str, Any]) -> int:
    """Experts of a layer that has some."""
    return next(raw[name] for name in EXPERTS if raw.get(name))


def shared_width(raw: Mapping[str, Any]) -> int:
    """Of the expert that all tokens pass; 0 without one."""
    own = (raw.get("n_shared_experts") or 0) * raw.get("moe_intermediate_size", 0)
    return own or raw.get("shared_expert_intermediate_size", 0)


def has_experts(raw: Mapping[str, Any], layer: int) -> bool:
    if raw["model_type"] in ONLY_EXPERTS:
        return True
    if raw["model_type"] not in GROUP_ROUTED and not raw["model_type"].endswith("_moe"):
        return False
    dense = layer in (raw.get("mlp_only_layers") or ()) or (layer + 1) % raw.get("decoder_sparse_step", 1)
    dense = dense or layer < (raw.get("first_k_dense_replace") or 0)
    return not dense


def expert_params(raw: Mapping[str, Any], width: int) -> int:
    """Of one expert."""
    hidden = raw["hidden_size"]
    return 3 * hidden * width + (2 * width + hidden) * (raw["model_type"] in BIASED)


def mlp_params(raw: Mapping[str, Any], layer: int) -> int:
    hidden, width = raw["hidden_size"], raw["intermediate_size"]
    if raw["model_type"] in ONLY_EXPERTS:
        experts = experts_of(raw)
        router = (hidden + (raw["model_type"] in BIASED)) * experts
        return experts * expert_params(raw, width) + router
    if not has_experts(raw, layer):
        return 3 * hidden * width + (2 * width + hidden if raw.get("mlp_bias") else 0)
    experts = experts_of(raw)
    count = experts * expert_params(raw, raw["moe_intermediate_size"]) + hidden * experts
    gate = hidden if raw["model_type"] == "qwen2_moe" else 0
    return count + 3 * hidden * shared_width(raw) + gate
