"""Parameters of the parts of a layer, from a model's config.json. Pure."""

from collections.abc import Mapping
from typing import Any

from siirl.models.families import family_of
from siirl.models.sizes import EXPERTS, is_expert_layer


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
    return family_of(raw["model_type"]).experts is not None and is_expert_layer(raw, layer)


def expert_params(raw: Mapping[str, Any], width: int) -> int:
    """Of one expert."""
    hidden, experts = raw["hidden_size"], family_of(raw["model_type"]).experts
    return 3 * hidden * width + (2 * width + hidden) * (experts is not None and experts.biases)


def mlp_params(raw: Mapping[str, Any], layer: int) -> int:
    hidden, width = raw["hidden_size"], raw["intermediate_size"]
    experts = family_of(raw["model_type"]).experts
    if experts is None or not is_expert_layer(raw, layer):
        return 3 * hidden * width + (2 * width + hidden if raw.get("mlp_bias") else 0)
    count = experts_of(raw)
    router = (hidden + experts.biases) * count
    shared = 3 * hidden * shared_width(raw) + hidden * (experts.shared == "gated")
    return count * expert_params(raw, raw[experts.width]) + router + shared
