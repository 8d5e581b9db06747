"""Attention of DeepSeek: keys and values, maybe queries too, are made of a compressed vector of each token.

What compresses is small, and whole on every tensor-parallel rank; what makes heads of it is cut by heads.
With sequence parallelism each rank compresses its own run of the tokens. Source: DeepSeek-AI, "DeepSeek-V2"
(2024), section 2.1. Legend: n tokens of this rank's run, N those of its attention (its share of the rows),
H heads of this rank, R features of a head that are turned, D all of a query or key, V those of a value.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from siirl.engines.train.megatron.layers import PackedAttention, PackedRows, RMSNorm, new_parameter

NORM_EPS = 1e-6
"""Of the norms of compressed features, whatever config.json says of the others: as transformers has it."""


class LatentAttention(MegatronModule):
    """Takes the place of megatron-core's attention in a layer."""

    def __init__(self, config: MLATransformerConfig, layer_number: int, pg_collection: Any, **_: Any):
        super().__init__(config)
        self._tp = pg_collection.tp
        self._heads = config.num_attention_heads // self._tp.size()
        self._widths = (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim)
        plain, turned, value = self._widths
        heads, into_queries = config.num_attention_heads, config.hidden_size
        self.linear_q_down = self.q_norm = None
        if config.q_lora_rank is not None:
            into_queries = config.q_lora_rank
            self.linear_q_down = WholeLinear(config, config.hidden_size, into_queries)
            self.q_norm = RMSNorm(config, into_queries, NORM_EPS)
        self.linear_kv_down = WholeLinear(config, config.hidden_size, config.kv_lora_rank + turned)
        self.kv_norm = RMSNorm(config, config.kv_lora_rank, NORM_EPS)
        options = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": self._tp}
        self.linear_q = ColumnParallelLinear(into_queries, heads * (plain + turned), **options)
        self.linear_kv = ColumnParallelLinear(config.kv_lora_rank, heads * (plain + value), **options)
        options |= {"input_is_parallel": True, "skip_bias_add": True}
        self.linear_proj = RowParallelLinear(heads * value, config.hidden_size, **options)
        self.core_attention = PackedAttention(config, layer_number, softmax_scale=config.softmax_scale)
        selected = config.recompute_modules if config.recompute_granularity == "selective" else ()
        self._recomputes = "core_attn" in selected

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedRows, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[n, 1, hidden] -> the same, and no bias."""
        compressed = hidden_states
        if self.linear_q_down is not None:
            compressed = self.q_norm(self.linear_q_down(compressed))
        query, _ = self.linear_q(compressed)
        sizes = [self.config.kv_lora_rank, self._widths[1]]
        compressed, turned_n1R = self.linear_kv_down(hidden_states).split(sizes, dim=-1)
        key_value, _ = self.linear_kv(self.kv_norm(compressed))
        attend = partial(self._attend, packed_seq_params)
        arguments = (query, key_value, self._for_all_heads(turned_n1R))
        recomputes = self._recomputes and self.training
        attended = checkpoint(attend, False, *arguments) if recomputes else attend(*arguments)
        return self.linear_proj(attended)

    def _for_all_heads(self, key_n1R: Tensor) -> Tensor:
        """The keys' features that heads share, of all tokens of the attention; gradients of ranks add up."""
        if self._tp.size() == 1:
            return key_n1R
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(key_n1R.contiguous(), group=self._tp)
        return copy_to_tensor_model_parallel_region(key_n1R, group=self._tp)

    def _attend(self, rows: PackedRows, query: Tensor, key_value: Tensor, key_N1R: Tensor) -> Tensor:
        """query [N, 1, H D], key_value [N, 1, H (D - R + V)] -> [N, 1, H V]."""
        plain, turned, width = self._widths
        tokens = len(query)
        query_NHD = query.view(tokens, self._heads, plain + turned)
        key_value = key_value.view(tokens, self._heads, plain + width)
        of_query, query_NHR = query_NHD.split([plain, turned], dim=-1)
        of_key, value_NHV = key_value.split([plain, width], dim=-1)
        query_NHR, key_N1R = self.core_attention.turned((query_NHR, key_N1R), rows)
        query_NHD = torch.cat([of_query, query_NHR], dim=-1)
        key_NHD = torch.cat([of_key, key_N1R.expand(-1, self._heads, -1)], dim=-1)
        value_NHD = F.pad(value_NHV, (0, plain + turned - width))  # kernels have one head size
        out_NHD = self.core_attention.attended(query_NHD, key_NHD, value_NHD, rows)
        return out_NHD[..., :width].reshape(tokens, 1, -1)


class WholeLinear(nn.Module):
    """A linear layer that every tensor-parallel rank has whole; with sequence parallelism for its tokens."""

    def __init__(self, config: Any, inputs: int, outputs: int):
        super().__init__()
        self.weight = new_parameter(config, (outputs, inputs))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
