"""Attention whose norms of queries and keys span all heads, of all tensor-parallel ranks: that of OLMo.

A rank has some of the heads, and the weights of the norms for these. Legend: N packed tokens, H query heads
on this rank, D head size.
"""

from typing import Any

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

    def heads(self, mixed: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        """As of any attention. Collective over the tensor-parallel ranks."""
        core, size = self.core_attention, self.hidden_size_per_attention_head
        parts = heads_of_groups(mixed, self.num_query_groups_per_partition, size)
        query, key, value = (part.reshape(len(mixed), -1, size) for part in parts)
        query, key = WholeNorms.apply(
            query, key, self.q_norm(), self.k_norm(), self.config.layernorm_epsilon, self.pg_collection.tp
        )
        return (*core.turned((query, key), rows), value)
