"""The joining of shared_attention.py as one Triton kernel: each element is read twice and written once.

One program works on ROWS rows, of which each is one head of one token. Needs a CUDA device and Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32


@triton.jit
def _join(
    out_ptr,
    more_ptr,
    lse_ptr,
    lse_stride,
    more_lse_ptr,
    more_lse_stride,
    rows,
    heads,
    size,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token, head = row // heads, row % heads
    lse_at = lse_ptr + head * lse_stride + token
    ours = tl.load(lse_at, mask=inside, other=0.0)
    theirs = tl.load(more_lse_ptr + head * more_lse_stride + token, mask=inside, other=0.0)
    top = tl.maximum(ours, theirs)
    joined = top + tl.log(tl.exp(ours - top) + tl.exp(theirs - top))
    column = tl.arange(0, SIZE)
    at = row[:, None] * size + column[None, :]
    here = inside[:, None] & (column < size)[None, :]
    out = tl.load(out_ptr + at, mask=here, other=0.0).to(tl.float32)
    more = tl.load(more_ptr + at, mask=here, other=0.0).to(tl.float32)
    out = out * tl.exp(ours - joined)[:, None] + more * tl.exp(theirs - joined)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=here)
    tl.store(lse_at, joined, mask=inside)


def join_(out_RHD: Tensor, lse_HR: Tensor, more_RHD: Tensor, more_lse_HR: Tensor) -> None:
    """out and lse of one part become those of both parts. The outputs are contiguous, the lse float32."""
    tokens, heads, size = out_RHD.shape
    assert out_RHD.is_contiguous() and more_RHD.is_contiguous()
    assert lse_HR.stride(1) == more_lse_HR.stride(1) == 1 and lse_HR.dtype == torch.float32
    rows = tokens * heads
    _join[(triton.cdiv(rows, ROWS),)](
        out_RHD,
        more_RHD,
        lse_HR,
        lse_HR.stride(0),
        more_lse_HR,
        more_lse_HR.stride(0),
        rows,
        heads,
        size,
        ROWS,
        triton.next_power_of_2(size),
    )
