"""Triton kernels of experts: tokens to their experts and back, gates, gradients of experts without tokens.

Each does in one pass over memory what takes several in plain torch, sums in float32 and rounds once; sums are
in one order. Needs a CUDA device and Triton.
Legend: N tokens, K experts of each, S = N K pairs in the order of their experts, D columns, F inner size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 2048
"""Of a row that a program holds at once."""
GATE_ROWS, MOST_GATED = 4, 1024
"""Rows and columns of a gate that one program computes."""
CLEARED = 16384
"""Numbers that one program sets to zero."""


@triton.jit
def _spread(
    x,
    rows,
    place,
    weight,
    other,
    products,
    size,
    TOP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for k in range(TOP):
        row = tl.load(place + token * TOP + k)
        factor = 1.0
        if WEIGHTED:
            factor = tl.load(weight + token * TOP + k).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, size, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < size
            value = tl.load(x + token * size + column, mask=inside, other=0.0).to(tl.float32)
            if WEIGHTED:
                total += value * tl.load(other + row * size + column, mask=inside, other=0.0).to(tl.float32)
                value = value * factor
            tl.store(rows + row * size + column, value.to(rows.dtype.element_ty), mask=inside)
        if WEIGHTED:
            tl.store(products + token * TOP + k, tl.sum(total, axis=0).to(products.dtype.element_ty))


@triton.jit
def _collect(
    rows,
    out,
    place,
    weight,
    size,
    TOP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP):
        row = tl.load(place + token * TOP + k)
        value = tl.load(rows + row * size + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weight + token * TOP + k).to(tl.float32)
        total += value
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


def _spread_rows(x_ND: Tensor, place_NK: Tensor) -> Tensor:
    """Each token's row to the places of its pairs: [S, D]."""
    rows_SD = x_ND.new_empty(place_NK.numel(), x_ND.shape[1])
    _run_spread(x_ND.contiguous(), rows_SD, place_NK)
    return rows_SD


def _run_spread(x_ND: Tensor, rows_SD: Tensor, place_NK: Tensor, *weighted: Tensor) -> None:
    (tokens, size), top = x_ND.shape, place_NK.shape[1]
    weight, other, products = weighted or (x_ND, x_ND, x_ND)
    block = min(MOST_COLUMNS, triton.next_power_of_2(size))
    if tokens and size:
        _spread[(tokens,)](
            x_ND, rows_SD, place_NK, weight, other, products, size, top, len(weighted) > 0, block, num_warps=4
        )


def _collect_rows(rows_SD: Tensor, place_NK: Tensor, weight_NK: Tensor | None = None) -> Tensor:
    """The sum of the rows of each token's pairs, by their weights: [N, D]."""
    (tokens, top), size = place_NK.shape, rows_SD.shape[1]
    out_ND = rows_SD.new_empty(tokens, size)
    block = min(MOST_COLUMNS, triton.next_power_of_2(size))
    weight = rows_SD if weight_NK is None else weight_NK
    if tokens and size:
        _collect[(tokens, triton.cdiv(size, block))](
            rows_SD, out_ND, place_NK, weight, size, top, weight_NK is not None, block, num_warps=4
        )
    return out_ND


class Spread(torch.autograd.Function):
    """(x [N, D], place of each pair [N, K]) -> [S, D]: the tokens in the order of their experts."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(place_NK)
        return _spread_rows(x_ND, place_NK)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        (place_NK,) = ctx.saved_tensors
        return _collect_rows(grad_SD.contiguous(), place_NK), None


class Collect(torch.autograd.Function):
    """(rows [S, D], weight [N, K], place of each pair [N, K]) -> [N, D]: what the experts of each token have
    made of it, by the router's weights."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, weight_NK: Tensor, place_NK: Tensor) -> Tensor:
        rows_SD, weight_NK = rows_SD.contiguous(), weight_NK.contiguous()
        ctx.save_for_backward(rows_SD, weight_NK, place_NK)
        return _collect_rows(rows_SD, place_NK, weight_NK)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_SD, weight_NK, place_NK = ctx.saved_tensors
        grad_SD, products_NK = torch.empty_like(rows_SD), torch.empty_like(weight_NK)
        _run_spread(grad_ND.contiguous(), grad_SD, place_NK, weight_NK, rows_SD, products_NK)
        return grad_SD, products_NK, None


@triton.jit
def _gate(both, out, rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    first = both + row[:, None] * (2 * size) + column[None, :]
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + size, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row[:, None] * size + column[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(both, grad, grad_both, rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = row[:, None] * (2 * size) + column[None, :]
    gate = tl.load(both + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + place + size, mask=inside, other=0.0).to(tl.float32)
    along = tl.load(grad + row[:, None] * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = along * up * share * (1.0 + gate * (1.0 - share))
    kind = grad_both.dtype.element_ty
    tl.store(grad_both + place, of_gate.to(kind), mask=inside)
    tl.store(grad_both + place + size, (along * gate * share).to(kind), mask=inside)


def _gate_work(x_SF: Tensor) -> tuple[tuple[int, int], int, int, int, int]:
    """Programs for all of a gate's outputs, and the last arguments of the kernels."""
    rows, size = x_SF.shape
    block = min(MOST_GATED, triton.next_power_of_2(size))
    return (triton.cdiv(rows, GATE_ROWS), triton.cdiv(size, block)), rows, size, GATE_ROWS, block


class GatedSilu(torch.autograd.Function):
    """Gate and up [S, 2 F], one behind the other in each row -> silu(gate) * up [S, F]."""

    @staticmethod
    def forward(ctx: Any, both_S2F: Tensor) -> Tensor:
        both_S2F = both_S2F.contiguous()
        ctx.save_for_backward(both_S2F)
        out_SF = both_S2F.new_empty(len(both_S2F), both_S2F.shape[1] // 2)
        if out_SF.numel():
            grid, *sizes = _gate_work(out_SF)
            _gate[grid](both_S2F, out_SF, *sizes)
        return out_SF

    @staticmethod
    def backward(ctx: Any, grad_SF: Tensor) -> Tensor:
        (both_S2F,) = ctx.saved_tensors
        grad_S2F, grad_SF = torch.empty_like(both_S2F), grad_SF.contiguous()
        if grad_SF.numel():
            grid, *sizes = _gate_work(grad_SF)
            _gate_backward[grid](both_S2F, grad_SF, grad_S2F, *sizes)
        return grad_S2F


@triton.jit
def _clear_idle(grad, ends, size, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if begin == tl.load(ends + expert):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), grad.dtype.element_ty)
        tl.store(grad + expert * size + at, zeros, mask=at < size)


def clear_idle_(grad_EOD: Tensor, ends_E: Tensor) -> None:
    """Zeros for the experts without rows; others are not touched. ends_E: where the rows of each end."""
    assert grad_EOD.is_contiguous()
    size = grad_EOD[0].numel()
    _clear_idle[(len(grad_EOD), triton.cdiv(size, CLEARED))](grad_EOD, ends_E, size, CLEARED, num_warps=8)
