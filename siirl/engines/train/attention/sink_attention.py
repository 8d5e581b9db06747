"""Attention of packed rows with sinks: each head has a logit more in every softmax, whose value is nothing.

A sink takes a share of the softmax: what comes out is that of plain attention, times the share of its own
normaliser in the sum of both. As where two parts of an attention are joined (shared_attention), the gradients
of queries, keys and values follow from the joined output and normaliser, by the kernels' own backward.
Source: Xiao et al., "Efficient streaming language models with attention sinks" (2023); the learned logit is
that of OpenAI's gpt-oss (2025).

Legend: N packed tokens, H query heads, K key-value heads, D head size, S segments, L the longest.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from siirl.engines.train.attention.shared_attention import Attended, Kernels
from siirl.engines.train.packed.sequence_bounds import SequenceBounds


class SinkAttention(torch.autograd.Function):
    """(query [N, H, D], key and value [N, K, D], sink [H], bounds, scale, window, kernels) -> [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_H: Tensor,
        bounds: SequenceBounds,
        scale: float | None,
        window: int | None,
        kernels: Kernels,
    ) -> Tensor:
        out, lse_HN, more = kernels.own(q, k, v, bounds, scale, window)
        joined_HN = torch.logaddexp(lse_HN.float(), sink_H.float().unsqueeze(1))
        out = (out * (lse_HN - joined_HN).exp().t().unsqueeze(-1)).to(out.dtype)
        ctx.save_for_backward(q, k, v, sink_H, out, joined_HN, *more)
        ctx.extra = bounds, scale, window, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink_H, out, joined_HN, *more = ctx.saved_tensors
        bounds, scale, window, kernels = ctx.extra
        grad = grads[0].contiguous()
        at = Attended(out, joined_HN, tuple(more))
        found = kernels.own_backward(grad, q, k, v, at, bounds, scale, window)
        share_HN = (sink_H.float().unsqueeze(1) - joined_HN).exp()
        of_sink_H = -(share_HN * (grad.float() * out.float()).sum(-1).t()).sum(1)
        return *found, of_sink_H.to(sink_H.dtype), None, None, None, None


def with_a_sink_key(
    q_SHLD: Tensor, k_SKLD: Tensor, v_SKLD: Tensor, sink_H: Tensor, mask_LL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with a key of zeros behind them that is the sink, and the mask that makes it one.

    For kernels that do not say their normaliser. mask_LL: what a query sees. The mask that comes out is added
    to logits, [1, H, L, L + 1], and has a gradient.
    """
    length = q_SHLD.shape[2]
    hidden_LL = torch.zeros_like(mask_LL, dtype=q_SHLD.dtype).masked_fill(~mask_LL, -torch.inf)
    heads = len(sink_H)
    seen = hidden_LL.expand(heads, length, length)
    sink = sink_H.to(q_SHLD.dtype).view(heads, 1, 1).expand(heads, length, 1)
    mask = torch.cat([seen, sink], dim=-1).unsqueeze(0)
    return F.pad(k_SKLD, (0, 0, 0, 1)), F.pad(v_SKLD, (0, 0, 0, 1)), mask
