"""Attention of packed rows by FlashAttention 4 (package flash-attn-4), in the place of torch's kernels.

In bf16 on GPUs of compute capability 9.0 and later. The functions below are private ones of the package: only
they take the normaliser of a softmax that was joined from parts. Their signatures are those of 4.0.0b36.
"""

from functools import partial

from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from transformers import AttentionInterface

from siirl.engines.train.attention.packed_attention import packed_attention
from siirl.engines.train.attention.shared_attention import Attended, FlashKernels, Grads, RowAttention

PACKED_BY_FLASH_4 = "siirl_packed_4"
"""Name under which transformers finds packed attention by these kernels. One with "flash" in it
would make it look for a package, or for kernels of a hub."""


class FlashFourKernels(FlashKernels):
    """FlashAttention 4's; a sliding window is left to torch."""

    takes_strides = True

    def alone(self, q, k, v, bounds, scale, window):
        if window is not None:
            return super().alone(q, k, v, bounds, scale, window)
        return RowAttention.apply(q, k, v, bounds, scale, self)

    @staticmethod
    def _forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window=None) -> Attended:
        assert window is None, "left to torch"
        out, lse, *_ = _flash_attn_fwd(
            *(q, k, v),
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            softmax_scale=scale,
            causal=causal,
            return_lse=True,
        )
        return Attended(out, lse)

    @staticmethod
    def _backward(grad, q, k, v, at, cu_q, cu_k, max_q, max_k, causal, scale, window=None) -> Grads:
        assert window is None, "left to torch"
        dq, dk, dv, *_ = _flash_attn_bwd(
            *(q, k, v, at.out, grad, at.lse),
            softmax_scale=scale,
            causal=causal,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
        )
        return dq, dk, dv


AttentionInterface.register(PACKED_BY_FLASH_4, partial(packed_attention, flash=FlashFourKernels()))
