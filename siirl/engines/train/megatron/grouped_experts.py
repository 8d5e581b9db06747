"""The experts of a rank computed by one grouped product for each of their matrices (moe_grouped_gemm).

Parameters stay those of megatron-core's SequentialMLP, one pair for each expert, so that weights and
checkpoints do not depend on how they are multiplied. Legend: T tokens of all experts of this rank, an
expert's after one another, E experts, N output and K input features.
"""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import silu

from siirl.engines.train.experts.grouped_product import GROUPED_MULTIPLE, GroupedProduct, expert_by_expert


class GroupedExperts(SequentialMLP):
    """SequentialMLP with grouped products; the router's weights are applied between the two matrices."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, K] and, for each expert, its number of tokens -> [T, K]; no communication."""
        counts = tokens_per_expert.tolist()
        first = [expert.linear_fc1 for expert in self.local_experts]
        second = [expert.linear_fc2 for expert in self.local_experts]
        both = _with_adapters(permuted_local_hidden_states, first, counts)
        weight_T1 = permuted_probs.unsqueeze(-1)
        if self.config.bias_activation_fusion:
            inner = weighted_bias_swiglu_impl(both, None, weight_T1, False)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = (silu(gate) * up * weight_T1).to(both.dtype)
        return _with_adapters(inner, second, counts), None


def _with_adapters(x_TK: Tensor, layers: Sequence[Any], counts: Sequence[int]) -> Tensor:
    """What the same linear layer of each expert makes of the expert's tokens, its LoRA adapter included."""
    out_TN = grouped_linear(x_TK, [layer.weight for layer in layers], counts)
    if not hasattr(layers[0], "lora"):
        return out_TN
    first, second = zip(*(layer.lora.halves() for layer in layers), strict=True)
    added_TN = grouped_linear(grouped_linear(x_TK, first, counts), second, counts)
    return out_TN + added_TN * layers[0].lora.scale


def grouped_linear(x_TK: Tensor, weights_NK: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Each expert's tokens times its weight [N, K]; counts: tokens of each expert. No communication.

    By the package grouped_gemm if it is there, else by torch's grouped product; in fp32, without any token,
    and where these do not take the sides of a weight, expert by expert.
    """
    odd = any(side % GROUPED_MULTIPLE for side in weights_NK[0].shape)
    if x_TK.dtype != torch.bfloat16 or not len(x_TK) or odd:
        return expert_by_expert(x_TK, weights_NK, counts)
    library = grouped_gemm() if x_TK.is_cuda else None
    if library is not None:
        sizes = torch.tensor(counts, dtype=torch.int64)
        return library.ops.gmm(x_TK, torch.stack(list(weights_NK)), sizes, trans_b=True)
    ends_E = torch.tensor(counts, device=x_TK.device).cumsum(0).to(torch.int32)
    return GroupedProduct.apply(x_TK, ends_E, *weights_NK)


@functools.cache
def grouped_gemm() -> Any:
    """The package of that name; None if it is not installed."""
    found = importlib.util.find_spec("grouped_gemm")
    return importlib.import_module("grouped_gemm") if found else None
