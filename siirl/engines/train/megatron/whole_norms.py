"""Attention whose norms of queries and keys span all heads, of all tensor-parallel ranks: that of OLMo.

A rank has some of the heads, and the weights of the norms for these. Legend: N packed tokens, H query heads
on this rank, D head size.
"""

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import checkpoint
from torch import Tensor

from siirl.engines.train.megatron.fused import WholeNorms, heads_of_groups
from siirl.engines.train.megatron.layers import Attention, PackedRows, Vector
from siirl.errors import NotSupportedError


class WholeNormAttention(Attention):
    """Norms queries and keys before they are turned."""

    def __init__(self, config: Any, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        if config.num_query_groups < self.world_size:
            raise NotSupportedError(
                f"not supported yet: tensor_model_parallel_size={self.world_size} with "
                f"{config.num_query_groups} key-value heads, whose norm spans all of them. Set it to a "
                "divisor of these."
            )
        size = self.hidden_size_per_attention_head
        self.q_norm = Vector(config, self.num_attention_heads_per_partition * size)
        self.k_norm = Vector(config, self.num_query_groups_per_partition * size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[n, 1, hidden] -> the same, and no bias. Collective over the tensor-parallel ranks."""
        assert packed_seq_params is not None
        core, size = self.core_attention, self.hidden_size_per_attention_head
        mixed, _bias = self.linear_qkv(hidden_states)
        parts = heads_of_groups(mixed, self.num_query_groups_per_partition, size)
        query, key, value = (part.reshape(len(mixed), -1, size) for part in parts)
        query, key = WholeNorms.apply(
            query, key, self.q_norm(), self.k_norm(), self.config.layernorm_epsilon, self.pg_collection.tp
        )
        heads = (*core.turned((query, key), packed_seq_params), value)
        attend = partial(core.attended, rows=packed_seq_params)
        recomputes = self.checkpoint_core_attention and self.training
        attended_NHD = checkpoint(attend, False, *heads) if recomputes else attend(*heads)
        return self.linear_proj(attended_NHD.reshape(len(mixed), 1, -1))
