"""How a Megatron parameter is made of Hugging Face tensors.

An `Entry` is a whole Megatron parameter, described as rows of Hugging Face tensors; `runs` cuts it for a
place on the tensor-parallel axis. Loading, export and checkpoints all walk over the same runs. Pure, no
communication.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import PretrainedConfig

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
    untrained: bool = False
    """Float32 whatever the model's type, also in exports, and never changed: a buffer of its module."""
    stacked: bool = False
    """Of an expert: the files have those of all experts of a layer in one tensor, [E, ...]."""
    inner: tuple[int, ...] = ()
    """Further sizes of a tensor of more than two dimensions, which is not cut by columns."""

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
        return (rows, self.columns // size if self.cut == "columns" else self.columns, *self.inner)


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


def hf_shapes(found: list[Entry]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> whole shape of every tensor that the entries are made of, in order."""
    rows: dict[str, int] = {}
    inner: dict[str, tuple[int, ...]] = {}
    experts: dict[str, tuple[int, ...]] = {}
    for entry in found:
        for block in (block for block in entry.blocks if block.hf):
            rows[block.hf] = max(rows.get(block.hf, 0), block.row + block.num_rows)
            inner[block.hf] = () if entry.columns is None else (entry.columns, *entry.inner)
            experts[block.hf] = (1 + (entry.expert or 0),) if entry.stacked else ()
    return {name: (*experts[name], num, *inner[name]) for name, num in rows.items()}


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
