"""Triton kernels of training: gathered keys, joined attentions, summed gradients, rows rounded to FP8.

Each stands for a function of the same arguments in plain torch, which it equals, and reads and writes every
number once. In those of attention one program works on ROWS rows, of which each is one head of one token.
Needs a CUDA device and Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from siirl.engines.train.packed.sequence_bounds import RowKeys

ROWS = 32
BLOCK = 4096
"""Numbers of a gradient that one program adds."""
MOST_COLUMNS = 1 << 16
"""Of a row that is rounded: one program holds it."""


@triton.jit
def _gather(
    key,
    value,
    keys_out,
    values_out,
    index,
    key_token,
    key_head,
    key_column,
    value_token,
    value_head,
    value_column,
    rows,
    heads,
    size,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    head, column = row % heads, tl.arange(0, SIZE)
    token = tl.load(index + row // heads, mask=inside, other=0)
    here = inside[:, None] & (column < size)[None, :]
    to = row[:, None] * size + column[None, :]
    key_at = (token * key_token + head * key_head)[:, None] + (column * key_column)[None, :]
    value_at = (token * value_token + head * value_head)[:, None] + (column * value_column)[None, :]
    tl.store(keys_out + to, tl.load(key + key_at, mask=here), mask=here)
    tl.store(values_out + to, tl.load(value + value_at, mask=here), mask=here)


@triton.jit
def _add_up(
    keys,
    values,
    key_out,
    value_out,
    first,
    places,
    key_token,
    key_head,
    key_column,
    value_token,
    value_head,
    value_column,
    rows,
    heads,
    size,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token, head, column = row // heads, row % heads, tl.arange(0, SIZE)
    begin = tl.load(first + token, mask=inside, other=0)
    num = tl.load(first + token + 1, mask=inside, other=0) - begin
    key = tl.zeros((ROWS, SIZE), tl.float32)
    value = tl.zeros((ROWS, SIZE), tl.float32)
    for i in range(tl.max(num, axis=0)):
        has = inside & (i < num)
        place = tl.load(places + begin + i, mask=has, other=0)
        at = ((place * heads + head) * size)[:, None] + column[None, :]
        there = has[:, None] & (column < size)[None, :]
        key += tl.load(keys + at, mask=there, other=0.0).to(tl.float32)
        value += tl.load(values + at, mask=there, other=0.0).to(tl.float32)
    here = inside[:, None] & (column < size)[None, :]
    key_at = (token * key_token + head * key_head)[:, None] + (column * key_column)[None, :]
    value_at = (token * value_token + head * value_head)[:, None] + (column * value_column)[None, :]
    tl.store(key_out + key_at, key.to(key_out.dtype.element_ty), mask=here)
    tl.store(value_out + value_at, value.to(value_out.dtype.element_ty), mask=here)


def gathered(k_NKD: Tensor, v_NKD: Tensor, keys: RowKeys) -> tuple[Tensor, Tensor]:
    """See shared_attention.gathered."""
    shape = (len(keys.index), *k_NKD.shape[1:])
    k_MKD, v_MKD = (x.new_empty(shape) for x in (k_NKD, v_NKD))
    grid, *sizes = _work(k_MKD)
    _gather[grid](k_NKD, v_NKD, k_MKD, v_MKD, keys.index, *k_NKD.stride(), *v_NKD.stride(), *sizes)
    return k_MKD, v_MKD


def added_up(
    dk_MKD: Tensor, dv_MKD: Tensor, k_NKD: Tensor, v_NKD: Tensor, keys: RowKeys
) -> tuple[Tensor, Tensor]:
    """See shared_attention.added_up."""
    dk_NKD, dv_NKD = torch.empty_like(k_NKD), torch.empty_like(v_NKD)
    dk_MKD, dv_MKD = dk_MKD.contiguous(), dv_MKD.contiguous()
    grid, *sizes = _work(dk_NKD)
    _add_up[grid](dk_MKD, dv_MKD, dk_NKD, dv_NKD, *keys.places, *dk_NKD.stride(), *dv_NKD.stride(), *sizes)
    return dk_NKD, dv_NKD


def _work(x: Tensor) -> tuple[tuple[int], int, int, int, int, int]:
    """Programs for all heads of all tokens of a tensor, and the last arguments of the kernels."""
    tokens, heads, size = x.shape
    rows = tokens * heads
    return (triton.cdiv(rows, ROWS),), rows, heads, size, ROWS, triton.next_power_of_2(size)


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


@triton.jit
def _add(total_ptr, grad_ptr, size, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    value = tl.load(grad_ptr + places, mask=inside).to(tl.float32)
    if not IS_FIRST:
        value += tl.load(total_ptr + places, mask=inside).to(tl.float32)
    tl.store(total_ptr + places, value.to(total_ptr.dtype.element_ty), mask=inside)


def added(total: Tensor | None, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """total + grad, in total; without one, a copy of grad in this type. Both lie alike, without holes.

    At the rate of the memory: torch's operation on two types runs at half of it.
    """
    is_first = total is None
    total = torch.empty_like(grad, dtype=dtype) if is_first else total
    _add[(triton.cdiv(grad.numel(), BLOCK),)](total, grad, grad.numel(), is_first, BLOCK=BLOCK, num_warps=8)
    return total


@triton.jit
def _round_rows(
    x,
    by,
    out,
    scale,
    num_columns,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < num_columns
    value = tl.load(x + row * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value = value * tl.load(by + column, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), 7.888609052210118e-31)  # 2^-100
    factor = tl.div_rn(largest, 448.0)
    tl.store(out + row * num_columns + column, tl.div_rn(value, factor).to(tl.float8e4nv), mask=inside)
    tl.store(scale + row, factor)


def rounded_on_gpu(x_ND: Tensor, by_D: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See float8.rounded: its numbers, bit for bit."""
    (num_rows, num_columns), x_ND = x_ND.shape, x_ND.contiguous()
    out_ND = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=x_ND.device)
    scale_N1 = torch.empty(num_rows, 1, dtype=torch.float32, device=x_ND.device)
    block = triton.next_power_of_2(num_columns)
    assert block <= MOST_COLUMNS, f"rows of {num_columns} numbers"
    by = x_ND if by_D is None else by_D.contiguous()
    if num_rows:
        _round_rows[(num_rows,)](
            x_ND,
            by,
            out_ND,
            scale_N1,
            num_columns,
            SCALED=by_D is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return out_ND, scale_N1
