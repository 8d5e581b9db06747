"""Causal attention over packed rows: the attention function that our language models are built with.

With sinks, each head has a logit more in every softmax, whose value is nothing. It takes a share of the
softmax: what comes out is that of plain attention, times the share of its own normaliser in the sum of both.
As where two parts of an attention are joined (shared_attention), the gradients of queries, keys and values
follow from the joined output and normaliser, by the kernels' own backward. Source: Xiao et al., "Efficient
streaming language models with attention sinks" (2023); the learned logit is that of OpenAI's gpt-oss (2025).

Legend: N packed tokens, S sequences among them, L the longest, H query heads, K key-value heads, D head size.
"""

from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from siirl.engines.train.attention.shared_attention import (
    Attended,
    FlashKernels,
    Kernels,
    PaddedKernels,
    band,
)
from siirl.engines.train.attention.ulysses import own_shares, whole_sequences
from siirl.engines.train.packed.sequence_bounds import SequenceBounds
from siirl.errors import NotSupportedError

PACKED_ATTENTION = "siirl_packed"
"""Name under which transformers finds `packed_attention`; it has no mask function, so no mask is built."""


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_bounds: SequenceBounds,
    scaling: float | None = None,
    sliding_window: int | EllipsisType | None = ...,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    flash: FlashKernels | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """Causal attention within each row: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D].

    Values may have fewer features than keys, and what comes out then as many as they. s_aux: the logit of the
    sink of each head, [H]; these rows share no prompts. sliding_window: None is none, whatever the module has
    (EXAONE 4, in layers that see all); a model that does not give it (Qwen2-MoE) says it by the mask, which
    packed rows have none of, and by the module.

    In bf16 or fp16 on CUDA by variable-length kernels (flash; None: torch's); otherwise by SDPA on a
    right-padded batch, which is exact: a causal query never sees the padding behind it. With softcap, which
    no such kernel knows, by the definition, a row at a time, in rows that share no prompts. Dropout is never
    applied. Communicates only where ranks share the sequences (sequence_bounds.shard): what comes in and goes
    out is then of this rank's tokens.
    """
    if sequence_bounds.alike:
        more = {"scaling": scaling, "sliding_window": sliding_window, "s_aux": s_aux, "softcap": softcap}
        return _by_width(module, query, key, value, sequence_bounds, **more, flash=flash), None
    if (s_aux is not None or softcap is not None) and flash is not None:
        raise NotSupportedError(
            f"not supported yet: {type(module).__name__}, which has attention sinks or caps, by "
            "other kernels than torch's. Set model.attention_kernels=torch."
        )
    width, narrow = value.shape[-1], query.shape[-1] - value.shape[-1]
    if narrow < 0:
        raise NotSupportedError(
            f"not supported yet: {type(module).__name__} with values wider than keys ({width} and "
            f"{query.shape[-1]} features of a head). Use another model."
        )
    if narrow:  # of compressed keys and values: kernels have one head size
        value = F.pad(value, (0, narrow))
    q_NHD, k_NKD, v_NKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    shard = sequence_bounds.shard
    if shard is not None:
        q_NHD, k_NKD, v_NKD = whole_sequences(q_NHD, k_NKD, v_NKD, shard)
        s_aux = s_aux if s_aux is None else s_aux.chunk(shard.group.size())[shard.group.rank()]
    window = getattr(module, "sliding_window", None) if sliding_window is ... else sliding_window
    by_flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    flash = flash or FlashKernels()
    if softcap is not None:
        assert sequence_bounds.shared is None and s_aux is None, "capped logits with shared prompts, or sinks"
        out_NHD = _capped(q_NHD, k_NKD, v_NKD, sequence_bounds, scaling, window, softcap)
    elif s_aux is not None and (by_flash or not query.is_cuda):
        assert sequence_bounds.shared is None, "prompts that rows of a model with sinks share"
        kernels = flash if by_flash else PaddedKernels()
        q_NHD, k_NKD, v_NKD = (x.contiguous() for x in (q_NHD, k_NKD, v_NKD))
        out_NHD = SinkAttention.apply(q_NHD, k_NKD, v_NKD, s_aux, sequence_bounds, scaling, window, kernels)
    elif sequence_bounds.shared is not None:
        longest = sequence_bounds.shared.longest_row
        assert window is None or window >= longest, "a window that ends in a shared prompt"
        kernels = flash if by_flash else PaddedKernels()
        if not (by_flash and flash.takes_strides):
            q_NHD, k_NKD, v_NKD = (x.contiguous() for x in (q_NHD, k_NKD, v_NKD))
        out_NHD = kernels.shared(q_NHD, k_NKD, v_NKD, sequence_bounds, scaling)
    elif by_flash:
        if not flash.takes_strides or window is not None:
            q_NHD, k_NKD, v_NKD = (x.contiguous() for x in (q_NHD, k_NKD, v_NKD))
        out_NHD = flash.alone(q_NHD, k_NKD, v_NKD, sequence_bounds, scaling, window)
    else:
        out_NHD = _padded(q_NHD, k_NKD, v_NKD, sequence_bounds, scaling, window, s_aux)
    out_NHD = out_NHD[..., :width]
    return (out_NHD if shard is None else own_shares(out_NHD, shard)).unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _by_width(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, **more: Any
) -> Tensor:
    """One call for the rows of each width."""
    found = []
    for index, own in bounds.alike:
        qkv = (x.index_select(2, index) for x in (query, key, value))
        found.append(packed_attention(module, *qkv, None, sequence_bounds=own, **more)[0])
    back = torch.cat([index for index, _ in bounds.alike]).argsort()
    return torch.cat(found, 1).squeeze(0).index_select(0, back).unsqueeze(0)  # as `_padded` gives it


def _padded(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    bounds: SequenceBounds,
    scale: float | None,
    window: int | None,
    sink_H: Tensor | None = None,
) -> Tensor:
    rows, length = bounds.num_sequences, bounds.max_length
    full = rows * length == q_NHD.shape[0]

    def pad(x_NHD: Tensor) -> Tensor:
        shape = (rows * length, *x_NHD.shape[1:])
        padded = x_NHD if full else x_NHD.new_zeros(shape).index_copy(0, bounds.padded_index, x_NHD)
        return padded.view(rows, length, *x_NHD.shape[1:]).transpose(1, 2)

    q, k, v = pad(q_NHD), pad(k_NKD), pad(v_NKD)
    mask = None if window is None or window >= length else band(length, window, q_NHD.device)
    if sink_H is not None:
        seen = band(length, length, q_NHD.device) if mask is None else mask
        k, v, mask = with_a_sink_key(q, k, v, sink_H, seen)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_NHD.shape[1] != k_NKD.shape[1],
    )
    out_NHD = out.transpose(1, 2).reshape(rows * length, *q_NHD.shape[1:])
    return out_NHD if full else out_NHD.index_select(0, bounds.padded_index)


def _capped(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    bounds: SequenceBounds,
    scale: float | None,
    window: int | None,
    cap: float,
) -> Tensor:
    """With logits of cap x tanh(logits / cap). Those of one row are in memory at a time, [H, L, L] in fp32:
    backward computes them again. Source: Gemma Team, "Gemma 2" (2024), 2."""
    lengths = bounds.cu_seqlens.diff().tolist()
    rows = zip(*(x.split(lengths) for x in (q_NHD, k_NKD, v_NKD)), strict=True)
    scale = q_NHD.shape[-1] ** -0.5 if scale is None else scale
    return torch.cat([checkpoint(_capped_row, *row, scale, window, cap, use_reentrant=False) for row in rows])


def _capped_row(
    q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scale: float, window: int | None, cap: float
) -> Tensor:
    length, times = len(q_LHD), q_LHD.shape[1] // k_LKD.shape[1]
    k_LHD, v_LHD = (x.repeat_interleave(times, 1) for x in (k_LKD, v_LKD))
    logits_HLL = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * scale
    logits_HLL = torch.tanh(logits_HLL / cap) * cap
    seen_LL = band(length, window or length, q_LHD.device)
    wide = torch.promote_types(q_LHD.dtype, torch.float32)
    share_HLL = logits_HLL.masked_fill(~seen_LL, -torch.inf).softmax(-1, dtype=wide).to(q_LHD.dtype)
    return torch.einsum("hqk,khd->qhd", share_HLL, v_LHD)


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
