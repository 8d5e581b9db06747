"""Attention whose norms of queries and keys span all heads, of all tensor-parallel ranks: that of OLMo.

A rank has some of the heads, and the weights of the norms for these. Legend: N packed tokens, H query heads
and K key-value heads on this rank, D head size.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from torch import Tensor

from siirl.engines.train.megatron.fused import heads_of_groups
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


class WholeNorms(torch.autograd.Function):
    """(queries [N, H, D], keys [N, K, D], their weights [H D] and [K D], epsilon, tensor-parallel ranks) ->
    both, each over the root mean square of all heads. Computes in fp32; collective over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_W: Tensor, key_W: Tensor, eps: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        wide = [x.flatten(1).float() for x in (query, key)]
        square_2N = _summed([x.square() for x in wide], group)
        widths = torch.tensor([x.shape[1] * group.size() for x in wide], device=query.device).unsqueeze(1)
        inverse_2N = torch.rsqrt(square_2N / widths + eps)
        ctx.save_for_backward(query, key, query_W, key_W, inverse_2N, widths)
        ctx.group = group
        found = (
            (x * inverse_N.unsqueeze(1) * weight_W.float()).type_as(query).view(like.shape)
            for x, inverse_N, weight_W, like in zip(
                wide, inverse_2N, (query_W, key_W), (query, key), strict=True
            )
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *heads, query_W, key_W, inverse_2N, widths = ctx.saved_tensors
        weights = (query_W, key_W)
        units = [
            x.flatten(1).float() * inverse_N.unsqueeze(1)
            for x, inverse_N in zip(heads, inverse_2N, strict=True)
        ]
        wide = [grad.flatten(1).float() for grad in grads]
        of_weights = [
            (grad * unit).sum(0).type_as(weight_W) if ctx.needs_input_grad[place] else None
            for place, grad, unit, weight_W in zip((2, 3), wide, units, weights, strict=True)
        ]
        wide = [grad * weight_W.float() for grad, weight_W in zip(wide, weights, strict=True)]
        along_2N = _summed([grad * unit for grad, unit in zip(wide, units, strict=True)], ctx.group) / widths
        found = (
            ((grad - unit * along_N.unsqueeze(1)) * inverse_N.unsqueeze(1)).type_as(x).view(x.shape)
            for grad, unit, along_N, inverse_N, x in zip(
                wide, units, along_2N, inverse_2N, heads, strict=True
            )
        )
        return *found, *of_weights, None, None


def _summed(parts: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Sums over the features of all ranks, [2, N]."""
    total = torch.stack([part.sum(1) for part in parts])
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
