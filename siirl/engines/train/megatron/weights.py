"""How Megatron parameters are made of Hugging Face tensors: one table, from which all else follows.

An `Entry` is a whole Megatron parameter, described as rows of Hugging Face tensors; `runs` cuts it for a
place on the tensor-parallel axis. Loading, export and checkpoints all walk over the same runs. Pure, no
communication. A new model adds a `Family`, and a function like `_dense_mlp` if its blocks differ.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from siirl.compiler.model_types import EXPERTS, why_not
from siirl.compiler.plan import Head
from siirl.engines.train.hf_model import VALUE_HEAD
from siirl.errors import NotSupportedError

EMBEDDING = "model.embed_tokens.weight"
"""Hugging Face's name of the embedding in every family here."""

Cut = Literal["whole", "rows", "each block", "columns"]


class Block(NamedTuple):
    """Consecutive rows of a Hugging Face tensor."""

    hf: str
    """Empty: rows that none has, and that stay zero."""
    row: int
    num_rows: int


@dataclass(frozen=True)
class Entry:
    """A Megatron parameter, whole."""

    name: str
    """Megatron's, with layer and expert counted over the whole model."""
    blocks: tuple[Block, ...]
    """Its rows, in order."""
    columns: int | None
    """None for a vector."""
    cut: Cut
    """How tensor parallelism cuts it: by rows; by those of each block (as gate and up); by columns; not."""
    layer: int | None = None
    """Its number; None for what stands before ("embedding") and after the layers."""
    expert: int | None = None
    """Its number; None outside of experts."""
    adapts: str = ""
    """Of half an adapter: the parameter that it is of."""

    @property
    def num_rows(self) -> int:
        return sum(block.num_rows for block in self.blocks)

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of the parameter on each of `size` tensor-parallel ranks, padding of the last included."""
        rows = self.num_rows
        if self.cut == "rows":
            rows = -(-rows // size)
        elif self.cut == "each block":
            rows //= size
        if self.columns is None:
            return (rows,)
        return (rows, self.columns // size if self.cut == "columns" else self.columns)


class Run(NamedTuple):
    """Rows start, start + 1, ... of a local parameter lie at (row, column) of a Hugging Face tensor."""

    start: int
    num_rows: int
    hf: str
    row: int
    column: int


def runs(entry: Entry, place: int, size: int) -> Iterator[Run]:
    """What the tensor-parallel rank `place` of `size` holds of an entry; rows that pad it are left out."""
    column = place * (entry.columns or 0) // size if entry.cut == "columns" else 0
    first, last = 0, entry.num_rows
    if entry.cut == "rows":
        chunk = -(-entry.num_rows // size)
        first, last = place * chunk, min((place + 1) * chunk, entry.num_rows)
    start = at = 0
    for block in entry.blocks:
        if entry.cut == "each block":
            num = block.num_rows // size
            if block.hf:
                yield Run(start, num, block.hf, block.row + place * num, 0)
            start += num
            continue
        low, high = max(first, at), min(last, at + block.num_rows)
        if low < high and block.hf:
            yield Run(low - first, high - low, block.hf, block.row + low - at, column)
        at += block.num_rows


@dataclass(frozen=True)
class Family:
    """What sets the models of a type apart."""

    mlp: Callable[[PretrainedConfig, int], list[Entry]]
    """The entries of a layer's MLP."""
    qkv_bias: Callable[[PretrainedConfig], bool] = lambda config: False
    """Whether queries, keys and values have biases."""
    qk_norm: bool = False
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
    shared: Callable[[PretrainedConfig, int], list[Entry]] = lambda config, layer: [],
) -> Callable[..., list[Entry]]:
    """Entries of a mixture of experts: Hugging Face's names for gate, up and down, and where they stand;
    shared: those of what all tokens pass, and of the router besides."""

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
        return found + shared(config, layer)

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
    "glm4": Family(
        _fused_mlp,
        qkv_bias=lambda config: config.attention_bias,
        outer_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        turns_neighbours=True,
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


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


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


def hf_shapes(found: list[Entry]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> whole shape of every tensor that the entries are made of, in order."""
    rows: dict[str, int] = {}
    columns: dict[str, int | None] = {}
    for entry in found:
        for block in (block for block in entry.blocks if block.hf):
            rows[block.hf] = max(rows.get(block.hf, 0), block.row + block.num_rows)
            columns[block.hf] = entry.columns
    return {name: (num,) if columns[name] is None else (num, columns[name]) for name, num in rows.items()}


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
    family, hidden, size = family_of(config), config.hidden_size, head_dim(config)
    hf, own = f"model.layers.{layer}", f"decoder.layers.{layer}"
    heads_size = config.num_attention_heads * size

    def vector(name: str, hf_name: str, length: int) -> Entry:
        return Entry(
            f"{own}.{name}.weight", (Block(f"{hf}.{hf_name}.weight", 0, length),), None, "whole", layer
        )

    found = [vector("input_layernorm", "input_layernorm", hidden)]
    for kind in ("weight", "bias") if family.qkv_bias(config) else ("weight",):
        columns = hidden if kind == "weight" else None
        blocks = _qkv_blocks(config, f"{hf}.self_attn", kind)
        found.append(Entry(f"{own}.self_attention.linear_qkv.{kind}", blocks, columns, "rows", layer))
    if family.qk_norm:
        found += [vector(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", size) for x in "qk"]
    output = (Block(f"{hf}.self_attn.o_proj.weight", 0, hidden),)
    found.append(Entry(f"{own}.self_attention.linear_proj.weight", output, heads_size, "columns", layer))
    found.append(vector("pre_mlp_layernorm", family.mlp_norm, hidden))
    for part, name in zip(("self_attention", "mlp"), family.outer_norms, strict=bool(family.outer_norms)):
        found.append(vector(f"{part}.outer_norm", name, hidden))
    return found + family.mlp(config, layer)


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
