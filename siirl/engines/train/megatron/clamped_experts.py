"""Experts and a router with biases, and attention with sinks and a bias of its output: what gpt-oss has.

The parameters of an expert lie as the files have them, [in, out], each gate beside its up: a cut of columns
leaves pairs together. Legend: T tokens of an expert, D hidden size, F width of an expert on this rank.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from siirl.engines.train.megatron.fused import ClampedUnit
from siirl.engines.train.megatron.layers import Attention, PackedRows, Vector, new_parameter


class ClampedExperts(MegatronModule):
    """The experts of a rank, one after another."""

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any, alpha: float, limit: float, **_: Any
    ):
        """alpha, limit: of the gated unit."""
        super().__init__(config)
        group = pg_collection.expt_tp
        experts = (ClampedExpert(config, group, alpha, limit) for _ in range(num_local_experts))
        self.local_experts = nn.ModuleList(experts)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """The tokens of all experts, an expert's after one another, and what the router weighs them by."""
        counts = tokens_per_expert.tolist()
        parts = (x.split(counts) for x in (permuted_local_hidden_states, permuted_probs.unsqueeze(-1)))
        found = (expert(*part) for expert, *part in zip(self.local_experts, *parts, strict=True))
        return torch.cat(list(found)), None


class ClampedExpert(nn.Module):
    """One of them. What its tensor-parallel ranks give is summed elsewhere: the first adds the bias."""

    def __init__(self, config: Any, group: Any, alpha: float, limit: float):
        super().__init__()
        self._group, self._how = group, (alpha, limit)
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size // group.size()
        self.gate_up = new_parameter(config, (hidden, 2 * width))
        self.gate_up_bias = new_parameter(config, (2 * width,))
        self.down = new_parameter(config, (width, hidden))
        self.down_bias = new_parameter(config, (hidden,))

    def forward(self, x_TD: Tensor, weight_T1: Tensor) -> Tensor:
        inner_TF = ClampedUnit.apply(torch.addmm(self.gate_up_bias, x_TD, self.gate_up), *self._how)
        bias_D = self.down_bias
        if self._group.size() > 1:
            bias_D = copy_to_tensor_model_parallel_region(bias_D, group=self._group)
            bias_D = bias_D * float(self._group.rank() == 0)
        return (torch.addmm(bias_D, inner_TF, self.down) * weight_T1).type_as(x_TD)


class BiasedRouter(TopKRouter):
    """megatron-core's with a bias, which it has only where all linear layers have some."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.bias = new_parameter(config, (config.num_moe_experts,))
        self.bias.sequence_parallel = config.sequence_parallel


class SinkAttention(Attention):
    """With a sink for each head of this rank, and a bias of the output if queries and keys have some."""

    def __init__(self, config: Any, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.core_attention.sink = Vector(config, config.num_attention_heads // self.world_size)
        self.output_bias = None
        if config.add_qkv_bias:
            self.output_bias = new_parameter(config, (config.hidden_size,))
            self.output_bias.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        found, bias = super().forward(hidden_states, attention_mask, packed_seq_params)
        return found if self.output_bias is None else found + self.output_bias, bias
