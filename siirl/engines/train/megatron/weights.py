"""Which parameters a Megatron model has, by family: one table, from which all else follows.

Pure, no communication. A new model adds a `Family`, and a function like `_dense_mlp` if its blocks differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from siirl.compiler.head_sizes import head_size
from siirl.compiler.model_types import EXPERTS, why_not
from siirl.compiler.plan import Head
from siirl.engines.train.hf_model import VALUE_HEAD
from siirl.engines.train.megatron.parameter_entries import Block, Entry, latent_entries, latent_options
from siirl.errors import NotSupportedError

CHOICE_BIAS = "choice_bias"
"""What a router adds where it chooses experts, as its module calls it."""
EMBEDDING = "model.embed_tokens.weight"
"""Hugging Face's name of the embedding in every family here."""


@dataclass(frozen=True)
class Family:
    """What sets the models of a type apart."""

    mlp: Callable[[PretrainedConfig, int], list[Entry]]
    """The entries of a layer's MLP."""
    qkv_bias: Callable[[PretrainedConfig], bool] = lambda config: False
    """Whether queries, keys and values have biases."""
    qk_norm: bool = False
    """Each head of queries and keys is normed, unless use_qk_norm says that it is not."""
    fused: bool = False
    """Its files have queries, keys and values in one tensor."""
    mlp_norm: str = "post_attention_layernorm"
    """Hugging Face's name of the norm of what the MLP is given."""
    outer_norms: tuple[str, ...] = ()
    """Hugging Face's names of norms of what attention and MLP give; none in most."""
    scales_embedding: bool = False
    """Embedded tokens are multiplied by the square root of their size."""
    windows: bool = False
    """Its attention sees no further than sliding_window, where config.json has one."""
    turns_neighbours: bool = False
    """The rotary embedding turns dimensions 2i and 2i + 1 together, not i and i + D/2."""
    attention: Callable[[PretrainedConfig, int], list[Entry]] | None = None
    """The entries of a layer's attention; None: as in most."""
    options: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}
    """Of the TransformerConfig."""


def _swiglu(config: PretrainedConfig, layer: int, wide: int, hf: str = "", own: str = "") -> list[Entry]:
    """A gated MLP that lies at mlp.HF in the files, and at mlp.OWN here."""
    hf, own = f"model.layers.{layer}.mlp{hf}", f"decoder.layers.{layer}.mlp{own}"
    gate_up = tuple(Block(f"{hf}.{name}_proj.weight", 0, wide) for name in ("gate", "up"))
    return _gated(config, layer, wide, gate_up, f"{hf}.down_proj.weight", own)


def _gated(
    config: PretrainedConfig, layer: int, wide: int, gate_up: tuple[Block, ...], down: str, own: str
) -> list[Entry]:
    hidden = config.hidden_size
    return [
        Entry(f"{own}.linear_fc1.weight", gate_up, hidden, "each block", layer),
        Entry(f"{own}.linear_fc2.weight", (Block(down, 0, hidden),), wide, "columns", layer),
    ]


def _dense_mlp(config: PretrainedConfig, layer: int) -> list[Entry]:
    return _swiglu(config, layer, config.intermediate_size)


def _fused_mlp(config: PretrainedConfig, layer: int) -> list[Entry]:
    """Of models whose files have gate and up in one tensor."""
    wide, hf = config.intermediate_size, f"model.layers.{layer}.mlp"
    gate_up = tuple(Block(f"{hf}.gate_up_proj.weight", row, wide) for row in (0, wide))
    return _gated(config, layer, wide, gate_up, f"{hf}.down_proj.weight", f"decoder.layers.{layer}.mlp")


def num_experts(config: PretrainedConfig) -> int:
    """Of a layer that has some; 0 in a dense model."""
    return next((int(num) for name in EXPERTS if (num := getattr(config, name, None))), 0)


def has_experts(config: PretrainedConfig, layer: int) -> bool:
    """Whether a layer of a mixture of experts has some: others are dense."""
    if layer < getattr(config, "first_k_dense_replace", 0) or layer in (
        getattr(config, "mlp_only_layers", None) or ()
    ):
        return False
    return (layer + 1) % (getattr(config, "decoder_sparse_step", None) or 1) == 0


def _experts(
    names: tuple[str, str, str],
    router: str,
    width: str,
    besides: Callable[[PretrainedConfig, int], list[Entry]] = lambda config, layer: [],
) -> Callable[..., list[Entry]]:
    """Entries of a mixture of experts: Hugging Face's names for gate, up and down, and where they stand;
    besides: those of what all tokens pass, and of the router."""

    def mlp(config: PretrainedConfig, layer: int) -> list[Entry]:
        if not has_experts(config, layer):
            return _dense_mlp(config, layer)
        hidden, wide, num = config.hidden_size, getattr(config, width), num_experts(config)
        hf, own = f"model.layers.{layer}.{router}", f"decoder.layers.{layer}.mlp"
        gate = (Block(f"{hf}.gate.weight", 0, num),)
        found = [Entry(f"{own}.router.weight", gate, hidden, "whole", layer)]
        for expert in range(num):
            local, parts = f"{own}.experts.local_experts.{expert}", f"{hf}.experts.{expert}"
            gate_up = tuple(Block(f"{parts}.{name}.weight", 0, wide) for name in names[:2])
            down = (Block(f"{parts}.{names[2]}.weight", 0, hidden),)
            found.append(Entry(f"{local}.linear_fc1.weight", gate_up, hidden, "each block", layer, expert))
            found.append(Entry(f"{local}.linear_fc2.weight", down, wide, "columns", layer, expert))
        return found + besides(config, layer)

    return mlp


def _expert_options(width: str, normalised: Callable[[PretrainedConfig], bool]) -> Callable[..., dict]:
    """How the router chooses: the probabilities of the chosen experts may or may not sum up to 1."""
    return lambda config: {
        "num_moe_experts": num_experts(config),
        "moe_layer_freq": [int(has_experts(config, layer)) for layer in range(config.num_hidden_layers)],
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(config, width),
        "moe_router_pre_softmax": not normalised(config),
    }


def _gated_expert(config: PretrainedConfig, layer: int) -> list[Entry]:
    """Qwen2-MoE's expert that all tokens pass, and the gate that weighs it for each."""
    hf, own = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    wide, gate = config.shared_expert_intermediate_size, Block(f"{hf}.shared_expert_gate.weight", 0, 1)
    return [
        *_swiglu(config, layer, wide, ".shared_expert", ".shared_experts"),
        Entry(f"{own}.shared_experts.gate_weight", (gate,), config.hidden_size, "whole", layer),
    ]


def _gated_expert_options(config: PretrainedConfig) -> dict[str, Any]:
    options = _expert_options("moe_intermediate_size", lambda config: config.norm_topk_prob)(config)
    width = config.shared_expert_intermediate_size
    return options | {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": True}


def _plain_expert(config: PretrainedConfig, layer: int) -> list[Entry]:
    """The expert that all tokens of DeepSeek-V2 pass."""
    return _swiglu(config, layer, _shared_width(config), ".shared_experts", ".shared_experts")


def _expert_and_bias(config: PretrainedConfig, layer: int) -> list[Entry]:
    """The same of DeepSeek-V3 and GLM-4-MoE, and the bias of their routers."""
    bias = Block(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", 0, num_experts(config))
    name = f"decoder.layers.{layer}.mlp.router.{CHOICE_BIAS}"
    return [
        *_plain_expert(config, layer),
        Entry(name, (bias,), None, "whole", layer, untrained=True),
    ]


def _shared_width(config: PretrainedConfig) -> int:
    return config.moe_intermediate_size * config.n_shared_experts


def _group_options(config: PretrainedConfig) -> dict[str, Any]:
    """Of routers that choose among groups of experts: see stage_routers.py."""
    options = _expert_options("moe_intermediate_size", lambda config: config.norm_topk_prob)(config)
    return options | {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_shared_expert_intermediate_size": _shared_width(config),
    }


def _softmax_group_options(config: PretrainedConfig) -> dict[str, Any]:
    """The same of DeepSeek-V2, whose weights never sum up to 1; greedy: there is but one group."""
    own = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
    one = {"moe_router_num_groups": 1, "moe_router_group_topk": 1} if config.topk_method == "greedy" else {}
    return _group_options(config) | own | one | latent_options(config)


def _gemma_options(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "activation_func": gelu_by_tanh,
        "softmax_scale": config.query_pre_attn_scalar**-0.5,
        "layernorm_zero_centered_gamma": True,  # norms multiply by 1 + weight
    }


def gelu_by_tanh(x: Tensor) -> Tensor:
    """GELU as transformers' gelu_pytorch_tanh has it."""
    return F.gelu(x, approximate="tanh")


def window_of(config: PretrainedConfig, layer: int) -> int | None:
    """Tokens that a layer's attention sees, the last one included; None: all before it."""
    kinds = getattr(config, "layer_types", None)
    if not family_of(config).windows or (kinds and kinds[layer] != "sliding_attention"):
        return None
    return config.sliding_window


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


FAMILIES = {
    "llama": Family(_dense_mlp),
    "cwm": Family(_dense_mlp, windows=True),
    "ministral": Family(_dense_mlp, windows=True),
    "mistral": Family(_dense_mlp, windows=True),
    "phi3": Family(_fused_mlp, fused=True, windows=True),
    "seed_oss": Family(_dense_mlp, qkv_bias=lambda config: config.attention_bias),
    "deepseek_v2": Family(
        _experts(_PROJECTIONS, "mlp", "moe_intermediate_size", _plain_expert),
        attention=latent_entries,
        options=_softmax_group_options,
    ),
    "deepseek_v3": Family(
        _experts(_PROJECTIONS, "mlp", "moe_intermediate_size", _expert_and_bias),
        attention=latent_entries,
        options=lambda config: _group_options(config) | latent_options(config),
    ),
    "glm4": Family(
        _fused_mlp,
        qkv_bias=lambda config: config.attention_bias,
        outer_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        turns_neighbours=True,
    ),
    "glm4_moe": Family(
        _experts(_PROJECTIONS, "mlp", "moe_intermediate_size", _expert_and_bias),
        qkv_bias=lambda config: config.attention_bias,
        qk_norm=True,
        options=_group_options,
    ),
    "gemma3_text": Family(
        _dense_mlp,
        qk_norm=True,
        mlp_norm="pre_feedforward_layernorm",
        outer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        scales_embedding=True,
        windows=True,
        options=_gemma_options,
    ),
    "qwen2": Family(_dense_mlp, qkv_bias=lambda config: True, windows=True),
    "qwen2_moe": Family(
        _experts(_PROJECTIONS, "mlp", "moe_intermediate_size", _gated_expert),
        qkv_bias=lambda config: config.qkv_bias,
        windows=True,
        options=_gated_expert_options,
    ),
    "qwen3": Family(_dense_mlp, qk_norm=True, windows=True),
    "qwen3_moe": Family(
        _experts(_PROJECTIONS, "mlp", "moe_intermediate_size"),
        qk_norm=True,
        windows=True,
        options=_expert_options("moe_intermediate_size", lambda config: config.norm_topk_prob),
    ),
    "mixtral": Family(
        _experts(("w1", "w3", "w2"), "block_sparse_moe", "intermediate_size"),
        windows=True,
        options=_expert_options("intermediate_size", lambda config: True),
    ),
}
"""Model type of config.json -> family."""


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model. NotSupportedError for model types and variants that are not in the table."""
    problem = why_not(config.to_dict(), "megatron")
    if problem:
        raise NotSupportedError(f"not supported yet: strategy=megatron: {problem}")
    return FAMILIES[config.model_type]


def has_qk_norm(config: PretrainedConfig) -> bool:
    """Whether each head of queries and keys is normed."""
    return family_of(config).qk_norm and getattr(config, "use_qk_norm", True)


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head."""
    return head_size(config.to_dict())


def entries(config: PretrainedConfig, head: Head = "lm") -> list[Entry]:
    """Every parameter of the model, in the order of export; a tied output head is not one.

    Only a language model may have tie_word_embeddings.
    """
    hidden = config.hidden_size
    vocab = config.vocab_size

    def whole(name: str, hf: str) -> Entry:
        return Entry(name, (Block(hf, 0, hidden),), None, "whole")

    found = [
        Entry(
            "embedding.word_embeddings.weight",
            (Block(EMBEDDING, 0, vocab),),
            hidden,
            "rows",
        )
    ]
    for layer in range(config.num_hidden_layers):
        found += _layer(config, layer)
    found.append(whole("decoder.final_layernorm.weight", "model.norm.weight"))
    if head != "lm":
        found.append(Entry(f"{VALUE_HEAD}.weight", (Block(f"{VALUE_HEAD}.weight", 0, 1),), hidden, "whole"))
        if head != "trained_score":
            found.append(Entry(f"{VALUE_HEAD}.bias", (Block(f"{VALUE_HEAD}.bias", 0, 1),), None, "whole"))
    elif not config.tie_word_embeddings:
        found.append(Entry("output_layer.weight", (Block("lm_head.weight", 0, vocab),), hidden, "rows"))
    return found


def num_active_weights(config: PretrainedConfig, head: Head = "lm") -> int:
    """Weights that a token is multiplied by: all matrices but the embedding table, of experts the chosen."""
    total = 0.0
    share = getattr(config, "num_experts_per_tok", 1) / (num_experts(config) or 1)
    for entry in entries(config, head)[1:]:
        if entry.columns is not None:
            total += entry.num_rows * entry.columns * (1.0 if entry.expert is None else share)
    return round(total) + (config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0)


def tied_head(config: PretrainedConfig) -> Entry:
    """The copy of the embedding that the last pipeline stage holds as its output head."""
    embedding = entries(config)[0]
    return Entry("output_layer.weight", embedding.blocks, embedding.columns, embedding.cut)


def _layer(config: PretrainedConfig, layer: int) -> list[Entry]:
    family, hidden = family_of(config), config.hidden_size
    hf, own = f"model.layers.{layer}", f"decoder.layers.{layer}"

    def vector(name: str, hf_name: str, length: int) -> Entry:
        return Entry(
            f"{own}.{name}.weight", (Block(f"{hf}.{hf_name}.weight", 0, length),), None, "whole", layer
        )

    found = [vector("input_layernorm", "input_layernorm", hidden)]
    found += (family.attention or _attention)(config, layer)
    found.append(vector("pre_mlp_layernorm", family.mlp_norm, hidden))
    for part, name in zip(("self_attention", "mlp"), family.outer_norms, strict=bool(family.outer_norms)):
        found.append(vector(f"{part}.outer_norm", name, hidden))
    return found + family.mlp(config, layer)


def _attention(config: PretrainedConfig, layer: int) -> list[Entry]:
    family, hidden, size = family_of(config), config.hidden_size, head_dim(config)
    hf, own = f"model.layers.{layer}.self_attn", f"decoder.layers.{layer}.self_attention"
    heads_size = config.num_attention_heads * size
    found = []
    for kind in ("weight", "bias") if family.qkv_bias(config) else ("weight",):
        columns = hidden if kind == "weight" else None
        blocks = _qkv_blocks(config, hf, kind)
        found.append(Entry(f"{own}.linear_qkv.{kind}", blocks, columns, "rows", layer))
    if has_qk_norm(config):
        for x in "qk":
            norm = (Block(f"{hf}.{x}_norm.weight", 0, size),)
            found.append(Entry(f"{own}.{x}_layernorm.weight", norm, None, "whole", layer))
    output = (Block(f"{hf}.o_proj.weight", 0, hidden),)
    return [*found, Entry(f"{own}.linear_proj.weight", output, heads_size, "columns", layer)]


def _qkv_blocks(config: PretrainedConfig, hf: str, kind: str) -> tuple[Block, ...]:
    """Megatron stores, for each key-value head: the query heads that share it, the key, the value."""
    size, num_groups = head_dim(config), config.num_key_value_heads
    queries = config.num_attention_heads // num_groups * size
    if family_of(config).fused:
        keys = config.num_attention_heads * size
        first = {"q": 0, "k": keys, "v": keys + num_groups * size}
        name = f"{hf}.qkv_proj.{kind}"
        return tuple(
            Block(name, first[x] + group * rows, rows)
            for group in range(num_groups)
            for x, rows in (("q", queries), ("k", size), ("v", size))
        )
    blocks = []
    for group in range(num_groups):
        blocks.append(Block(f"{hf}.q_proj.{kind}", group * queries, queries))
        blocks += [Block(f"{hf}.{x}_proj.{kind}", group * size, size) for x in "kv"]
    return tuple(blocks)
