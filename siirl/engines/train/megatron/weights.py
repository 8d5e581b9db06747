"""Which parameters a Megatron model has, by its family: one list, from which all else follows.

Pure, no communication. What sets families apart is their row (siirl/models/families.py); a new one needs code
here only if its blocks differ from all of these.
"""

import re
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from siirl.compiler.plan import Head
from siirl.engines.train.hf_model import VALUE_HEAD
from siirl.engines.train.megatron.parameter_entries import Block, Entry, latent_entries, latent_options
from siirl.errors import NotSupportedError
from siirl.models import families
from siirl.models.families import Experts, Family
from siirl.models.sizes import EXPERTS, has_qk_norm, has_qkv_bias, head_size, is_expert_layer
from siirl.models.trained import why_not

CHOICE_BIAS = "choice_bias"
"""What a router adds where it chooses experts, as its module calls it."""
EMBEDDING = "model.embed_tokens.weight"
"""Hugging Face's name of the embedding in every family of texts."""


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
    return is_expert_layer(config.to_dict(), layer)


def _mlp(config: PretrainedConfig, layer: int) -> list[Entry]:
    family = family_of(config)
    if family.experts is not None and has_experts(config, layer):
        return _mixture(config, layer, family.experts)
    return _fused_mlp(config, layer) if family.fused_mlp else _dense_mlp(config, layer)


def _mixture(config: PretrainedConfig, layer: int, row: Experts) -> list[Entry]:
    """The experts of a layer and their router, what all tokens pass, and the bias of the router."""
    hidden, wide, num = config.hidden_size, getattr(config, row.width), num_experts(config)
    hf, own = f"model.layers.{layer}.{row.module}", f"decoder.layers.{layer}.mlp"
    gate = (Block(f"{hf}.{row.router}.weight", 0, num),)
    found = [Entry(f"{own}.router.weight", gate, hidden, "whole", layer)]
    if row.biases:
        bias = (Block(f"{hf}.{row.router}.bias", 0, num),)
        found.append(Entry(f"{own}.router.bias", bias, None, "whole", layer))
    for expert in range(num):
        local, parts = f"{own}.experts.local_experts.{expert}", f"{hf}.experts.{expert}"
        gate_up = tuple(Block(f"{parts}.{name}.weight", 0, wide) for name in row.matrices[:2])
        down = (Block(f"{parts}.{row.matrices[2]}.weight", 0, hidden),)
        if row.stacked:
            gate_up = tuple(Block(f"{hf}.{row.stacked[0]}", first, wide) for first in (0, wide))
            down = (Block(f"{hf}.{row.stacked[1]}", 0, hidden),)
        of = {"layer": layer, "expert": expert, "stacked": row.stacked is not None}
        if row.biases:
            found += _biased_expert(hidden, wide, local, gate_up[0].hf, down[0].hf, of)
            continue
        found.append(Entry(f"{local}.linear_fc1.weight", gate_up, hidden, "each block", **of))
        found.append(Entry(f"{local}.linear_fc2.weight", down, wide, "columns", **of))
    if row.shared == "gated":
        one = Block(f"{hf}.shared_expert_gate.weight", 0, 1)
        found += _swiglu(config, layer, _shared_width(config, row), ".shared_expert", ".shared_experts")
        found.append(Entry(f"{own}.shared_experts.gate_weight", (one,), hidden, "whole", layer))
    elif row.shared == "plain":
        found += _swiglu(config, layer, _shared_width(config, row), ".shared_experts", ".shared_experts")
    if row.choice_bias:
        bias = (Block(f"{hf}.gate.e_score_correction_bias", 0, num),)
        found.append(Entry(f"{own}.router.{CHOICE_BIAS}", bias, None, "whole", layer, untrained=True))
    return found


def _biased_expert(
    hidden: int, wide: int, local: str, gate_up: str, down: str, of: dict[str, Any]
) -> list[Entry]:
    """One whose matrices are stored as [in, out]. See clamped_experts.py."""
    return [
        Entry(f"{local}.gate_up", (Block(gate_up, 0, hidden),), 2 * wide, "columns", **of),
        Entry(f"{local}.gate_up_bias", (Block(f"{gate_up}_bias", 0, 2 * wide),), None, "rows", **of),
        Entry(f"{local}.down", (Block(down, 0, wide),), hidden, "rows", **of),
        Entry(f"{local}.down_bias", (Block(f"{down}_bias", 0, hidden),), None, "whole", **of),
    ]


def _shared_width(config: PretrainedConfig, row: Experts) -> int:
    if row.shared == "gated":
        return config.shared_expert_intermediate_size
    return config.moe_intermediate_size * config.n_shared_experts


def family_options(config: PretrainedConfig) -> dict[str, Any]:
    """What of the TransformerConfig follows from a model's family."""
    family = family_of(config)
    found: dict[str, Any] = {}
    if family.gelu:
        found["activation_func"] = gelu_by_tanh
    if family.query_scale:
        found["softmax_scale"] = getattr(config, family.query_scale) ** -0.5
    if "attention_multiplier" in family.scales:
        found["softmax_scale"] = config.attention_multiplier
    if family.centered_norms:
        found["layernorm_zero_centered_gamma"] = True
    if family.experts is not None:
        found |= _expert_options(config, family.experts)
    if family.latent is not None:
        found |= latent_options(config)
    return found


def _expert_options(config: PretrainedConfig, row: Experts) -> dict[str, Any]:
    """How the router chooses: the probabilities of the chosen experts may or may not sum up to 1. Of routers
    that choose among groups of experts see stage_routers.py; greedy: there is but one group."""
    normalised = not row.normed_by or getattr(config, row.normed_by)
    found = {
        "num_moe_experts": num_experts(config),
        "moe_layer_freq": [int(has_experts(config, layer)) for layer in range(config.num_hidden_layers)],
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(config, row.width),
        "moe_router_pre_softmax": row.groups == "softmax" or not normalised,
    }
    if row.shared:
        found["moe_shared_expert_intermediate_size"] = _shared_width(config, row)
    if row.shared == "gated":
        found["moe_shared_expert_gate"] = True
    if row.groups:
        one = row.groups == "softmax" and config.topk_method == "greedy"
        found |= {
            "moe_router_score_function": row.groups,
            "moe_router_num_groups": 1 if one else config.n_group,
            "moe_router_group_topk": 1 if one else config.topk_group,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_dtype": "fp32",  # as transformers has it
        }
    return found


def embedding_scale(config: PretrainedConfig, dtype: torch.dtype) -> float:
    """What embedded tokens are multiplied by, in activations of a type: a root is rounded to it."""
    family = family_of(config)
    if family.scales_embedding:
        return float(torch.tensor(config.hidden_size**0.5, dtype=dtype))
    return config.embedding_multiplier if "embedding_multiplier" in family.scales else 1.0


def gelu_by_tanh(x: Tensor) -> Tensor:
    """GELU as transformers' gelu_pytorch_tanh has it."""
    return F.gelu(x, approximate="tanh")


def window_of(config: PretrainedConfig, layer: int) -> int | None:
    """Tokens that a layer's attention sees, the last one included; None: all before it."""
    kinds = getattr(config, "layer_types", None)
    if not family_of(config).windows or (kinds and kinds[layer] != "sliding_attention"):
        return None
    return config.sliding_window


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model. NotSupportedError for model types and variants that are not in the table."""
    problem = why_not(config.to_dict(), "megatron")
    if problem:
        raise NotSupportedError(f"not supported yet: strategy=megatron: {problem}")
    return families.family_of(config.model_type)


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head."""
    return head_size(config.to_dict())


def entries(config: PretrainedConfig, head: Head = "lm", place: str = "") -> list[Entry]:
    """Every parameter of the model, in the order of export; a tied output head is not one.

    Only a language model may have tie_word_embeddings. place: of the decoder in names, where they are not to
    be those of the files.
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
    if family_of(config).norms_weigh:
        found.append(whole("decoder.final_layernorm.weight", "model.norm.weight"))
    if head != "lm":
        found.append(Entry(f"{VALUE_HEAD}.weight", (Block(f"{VALUE_HEAD}.weight", 0, 1),), hidden, "whole"))
        if head != "trained_score":
            found.append(Entry(f"{VALUE_HEAD}.bias", (Block(f"{VALUE_HEAD}.bias", 0, 1),), None, "whole"))
    elif not config.tie_word_embeddings:
        found.append(Entry("output_layer.weight", (Block("lm_head.weight", 0, vocab),), hidden, "rows"))
    place = place or family_of(config).decoder
    return found if place == "model" else [_placed(entry, place) for entry in found]


def _placed(entry: Entry, place: str) -> Entry:
    """An entry of a decoder that the files have elsewhere than at "model"."""
    blocks = (block._replace(hf=re.sub(r"^model\.", f"{place}.", block.hf)) for block in entry.blocks)
    return replace(entry, blocks=tuple(blocks))


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

    inner = family.mlp_norm and family.norms_weigh
    found = [vector("input_layernorm", "input_layernorm", hidden)] if inner else []
    found += latent_entries(config, layer) if family.latent is not None else _attention(config, layer)
    if inner:
        found.append(vector("pre_mlp_layernorm", family.mlp_norm, hidden))
    for part, name in zip(("self_attention", "mlp"), family.outer_norms, strict=bool(family.outer_norms)):
        found.append(vector(f"{part}.outer_norm", name, hidden))
    return found + _mlp(config, layer)


def _attention(config: PretrainedConfig, layer: int) -> list[Entry]:
    hidden, size, said = config.hidden_size, head_dim(config), config.to_dict()
    hf, own = f"model.layers.{layer}.self_attn", f"decoder.layers.{layer}.self_attention"
    heads_size = config.num_attention_heads * size
    found = []
    for kind in ("weight", "bias") if has_qkv_bias(said) else ("weight",):
        columns = hidden if kind == "weight" else None
        blocks = _qkv_blocks(config, hf, kind)
        found.append(Entry(f"{own}.linear_qkv.{kind}", blocks, columns, "rows", layer))
    if has_qk_norm(said):
        whole = family_of(config).qk_norm == "whole"
        own_name, cut = ("norm", "rows") if whole else ("layernorm", "whole")
        for x, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            norm = (Block(f"{hf}.{x}_norm.weight", 0, size * (heads if whole else 1)),)
            found.append(Entry(f"{own}.{x}_{own_name}.weight", norm, None, cut, layer))
    if family_of(config).sinks:
        sinks = (Block(f"{hf}.sinks", 0, config.num_attention_heads),)
        found.append(Entry(f"{own}.core_attention.sink.weight", sinks, None, "rows", layer))
        if has_qkv_bias(said):
            bias = (Block(f"{hf}.o_proj.bias", 0, hidden),)
            found.append(Entry(f"{own}.output_bias", bias, None, "whole", layer))
    output = (Block(f"{hf}.o_proj.weight", 0, hidden),)
    return [*found, Entry(f"{own}.linear_proj.weight", output, heads_size, "columns", layer)]


def _qkv_blocks(config: PretrainedConfig, hf: str, kind: str) -> tuple[Block, ...]:
    """Megatron stores, for each key-value head: the query heads that share it, the key, the value."""
    size, num_groups = head_dim(config), config.num_key_value_heads
    queries = config.num_attention_heads // num_groups * size
    if family_of(config).fused_qkv:
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
