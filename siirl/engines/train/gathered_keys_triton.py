"""gathered_keys.py on a GPU: keys and values by one kernel each way, every number read once and written once.

One program works on ROWS rows, of which each is one head of one token. Needs a CUDA device and Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from siirl.engines.train.sequence_bounds import RowKeys

ROWS = 32


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
    """See gathered_keys.gathered."""
    shape = (len(keys.index), *k_NKD.shape[1:])
    k_MKD, v_MKD = (x.new_empty(shape) for x in (k_NKD, v_NKD))
    grid, *sizes = _work(k_MKD)
    _gather[grid](k_NKD, v_NKD, k_MKD, v_MKD, keys.index, *k_NKD.stride(), *v_NKD.stride(), *sizes)
    return k_MKD, v_MKD


def added_up(
    dk_MKD: Tensor, dv_MKD: Tensor, k_NKD: Tensor, v_NKD: Tensor, keys: RowKeys
) -> tuple[Tensor, Tensor]:
    """See gathered_keys.added_up."""
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
