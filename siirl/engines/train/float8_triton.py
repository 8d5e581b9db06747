"""Rows rounded to FP8 on a GPU, each read once: the numbers of float8.rounded, bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 1 << 16
"""A row is held by one program."""


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
    """See float8.rounded."""
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
