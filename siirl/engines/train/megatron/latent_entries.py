"""The parameters of attention whose keys and values, maybe queries too, are made of compressed ones. Pure."""

import math
from typing import Any

from transformers import PretrainedConfig

from siirl.engines.train.megatron.parameter_entries import Block, Entry


def latent_entries(config: PretrainedConfig, layer: int) -> list[Entry]:
    """Those of a layer. What compresses is whole on every tensor-parallel rank; heads are cut over them."""
    hf, own = f"model.layers.{layer}.self_attn", f"decoder.layers.{layer}.self_attention"
    hidden, heads = config.hidden_size, config.num_attention_heads
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    of_kv, of_q = config.kv_lora_rank, config.q_lora_rank

    def matrix(name: str, hf_name: str, rows: int, columns: int, cut: Any) -> Entry:
        block = Block(f"{hf}.{hf_name}.weight", 0, rows)
        return Entry(f"{own}.{name}.weight", (block,), columns, cut, layer)

    def norm(name: str, hf_name: str, length: int) -> Entry:
        return Entry(
            f"{own}.{name}.weight", (Block(f"{hf}.{hf_name}.weight", 0, length),), None, "whole", layer
        )

    if of_q is None:
        found = [matrix("linear_q", "q_proj", queries, hidden, "rows")]
    else:
        found = [
            matrix("linear_q_down", "q_a_proj", of_q, hidden, "whole"),
            norm("q_norm", "q_a_layernorm", of_q),
            matrix("linear_q", "q_b_proj", queries, of_q, "rows"),
        ]
    keys_values = heads * (config.qk_nope_head_dim + config.v_head_dim)
    return [
        *found,
        matrix("linear_kv_down", "kv_a_proj_with_mqa", of_kv + config.qk_rope_head_dim, hidden, "whole"),
        norm("kv_norm", "kv_a_layernorm", of_kv),
        matrix("linear_kv", "kv_b_proj", keys_values, of_kv, "rows"),
        matrix("linear_proj", "o_proj", hidden, heads * config.v_head_dim, "columns"),
    ]


def latent_options(config: PretrainedConfig) -> dict[str, Any]:
    """Of the MLATransformerConfig, whose sizes alone are used: the layers are siirl's."""
    return {
        "multi_latent_attention": False,
        "num_query_groups": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "softmax_scale": _softmax_scale(config),
        "rotary_interleaved": getattr(config, "rope_interleave", True),
    }


def _softmax_scale(config: PretrainedConfig) -> float:
    """1 / sqrt(D) of a head of D features, greater where the rotary embedding is stretched.

    Source: Peng et al., "YaRN" (2023), section 3.4; mscale_all_dim is DeepSeek's weight of that factor.
    """
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    weight = rope.get("mscale_all_dim") if rope.get("rope_type", "default") != "default" else None
    if not weight or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * weight * math.log(rope["factor"]) + 1.0) ** 2
