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


class GroupedExperts(SequentialMLP):
    """SequentialMLP with grouped products; the router's weights are applied between the two matrices."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, K] and, for each expert, its number of tokens -> [T, K]; no communication."""
        counts = tokens_per_expert.tolist()
        first = [expert.linear_fc1.weight for expert in self.local_experts]
        second = [expert.linear_fc2.weight for expert in self.local_experts]
        both = grouped_linear(permuted_local_hidden_states, first, counts)
        weight_T1 = permuted_probs.unsqueeze(-1)
        if self.config.bias_activation_fusion:
            inner = weighted_bias_swiglu_impl(both, None, weight_T1, False)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = (silu(gate) * up * weight_T1).to(both.dtype)
        return grouped_linear(inner, second, counts), None


def grouped_linear(x_TK: Tensor, weights_NK: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Each expert's tokens times its weight [N, K]; counts: tokens of each expert. No communication.

    By the package grouped_gemm if it is there, else by torch's grouped product; in fp32, and without any
    token, expert by expert.
    """
    if x_TK.dtype != torch.bfloat16 or not len(x_TK):
        parts = x_TK.split(list(counts))
        return torch.cat([part @ weight.t() for part, weight in zip(parts, weights_NK, strict=True)])
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


class GroupedProduct(torch.autograd.Function):
    """Tokens times their experts' weights by torch._grouped_mm, which wants the weights in one tensor.

    They are copied together for every product: a few hundred megabytes, less than a millisecond on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, ends_E: Tensor, *weights_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, ends_E, *weights_NK)
        return torch._grouped_mm(x_TK, torch.stack(weights_NK).transpose(-2, -1), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, ends_E, *weights_NK = ctx.saved_tensors
        grad_TN = grad_TN.contiguous()
        grad_x = grads = None
        if ctx.needs_input_grad[0]:
            grad_x = torch._grouped_mm(grad_TN, torch.stack(weights_NK), offs=ends_E)
        if any(ctx.needs_input_grad[2:]):
            grad_ENK = torch._grouped_mm(grad_TN.t(), x_TK, offs=ends_E)
            is_idle_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
            grads = grad_ENK.masked_fill_(is_idle_E[:, None, None], 0.0).unbind()
        return grad_x, None, *(grads or [None] * len(weights_NK))
