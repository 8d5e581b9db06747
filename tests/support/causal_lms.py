"""Every causal language model that transformers knows, as a tiny one with random weights."""

from pathlib import Path
from typing import Any

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "word_embed_proj_dim": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""Sizes under all names that configurations have for them."""
LATENT = {
    **{
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
}
DELTA_NETS = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
TOWER = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"patch_size": 4, "image_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
}
GRANITE = {
    **{"logits_scaling": 3.0, "attention_multiplier": 0.2},
    **{"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
}
OF_A_KIND = {
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "q_lora_rank": 16},
    "glm4_moe": {"head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    **{
        kind: {**DELTA_NETS, "shared_expert_intermediate_size": 16}
        for kind in ("qwen3_5_moe_text", "qwen3_next")
    },
    "qwen3_5_text": DELTA_NETS,
    "dots1": {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), GRANITE),
    "gpt_bigcode": {"num_key_value_heads": 1},
}
"""What a kind of model has besides, so that all its parts are there."""
MAX_PARAMS = 1 << 24
"""Models of parts that these sizes do not reach, as image encoders, are not built."""


def model_types() -> list[str]:
    """What config.json of a causal language model may name as its model_type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]


def tiny_config(kind: str, **changes: Any) -> Any:
    """A configuration of two small layers; whatever transformers raises where these sizes do not do."""
    from transformers import CONFIG_MAPPING

    kind_of_config = CONFIG_MAPPING[kind]
    known = kind_of_config()
    derived = {name for name in dir(kind_of_config) if isinstance(getattr(kind_of_config, name), property)}
    sizes = {name: value for name, value in SMALL.items() if hasattr(known, name) and name not in derived}
    return kind_of_config(**sizes | OF_A_KIND.get(kind, {}) | changes)


def write_model(folder: Path, config: Any, seed: int = 0) -> Path:
    """Write a model of a configuration, fp32, whose weights and biases are all random."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder


def write_seeing_model(folder: Path, kind: str, text: str, tied: bool = False, **sizes: Any) -> Any:
    """Write a small model with a tower and a text part, and a tensor that transformers has no place for."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    made, known = CONFIG_MAPPING[kind], CONFIG_MAPPING[kind]().vision_config
    tower = {name: size for name, size in TOWER.items() if hasattr(known, name)}
    decoder = tiny_config(text, tie_word_embeddings=tied, **sizes).to_dict()
    vision = {**tower, "model_type": known.model_type}
    torch.manual_seed(0)
    config = made(text_config=decoder, vision_config=vision, tie_word_embeddings=tied, image_token_id=9)
    config.eos_token_id = [5, 6]
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for param in model.parameters():
        param.data += 0.1 * torch.randn_like(param)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"mtp.fc.weight": torch.ones(2, 3)}, folder / "model.safetensors", {"format": "pt"})
    return model


def num_params(config: Any) -> int:
    """Weights of a model, built without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
