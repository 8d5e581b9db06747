"""Triton kernels of the causal convolution of packed rows, forward and backward, as one operation of a graph.

What state_layers.traced_convolution sums in plain torch: each reads and writes every number once, sums in
float32 and rounds once; sums are in one order. Needs a CUDA device and Triton.
Legend: N packed tokens, C channels, W width, R runs of tokens of which a program sums the weights' gradients.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 4
"""Taps of a convolution: a backward program holds as many tokens, and what is known of their gradients."""
ROWS, COLUMNS = 16, 256
"""Tokens and channels that one program computes forward."""
RUN, STRIP = 64, 128
"""Tokens and channels that one program computes backward, one token after another."""


@triton.jit
def _forward(
    x,
    weight,
    bias,
    place,
    out,
    tokens,
    channels,
    row,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, wide = token < tokens, column < channels
    before = tl.load(place + token, mask=inside, other=-1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if BIASED:
        total += tl.load(bias + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        factor = tl.load(weight + column * WIDTH + (WIDTH - 1 - back), mask=wide, other=0.0).to(tl.float32)
        there = (before >= back)[:, None] & wide[None, :]
        read = tl.load(x + (token - back)[:, None] * row + column[None, :], mask=there, other=0.0)
        total += read.to(tl.float32) * factor[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    to = token[:, None] * channels + column[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside[:, None] & wide[None, :])


@triton.jit
def _tap(weight, column, wide, BACK: tl.constexpr, WIDTH: tl.constexpr, STRIP: tl.constexpr):
    factor = tl.zeros((STRIP,), tl.float32)
    if BACK < WIDTH:
        factor = tl.load(weight + column * WIDTH + (WIDTH - 1 - BACK), mask=wide, other=0.0).to(tl.float32)
    return factor


@triton.jit
def _backward(
    x,
    weight,
    bias,
    place,
    grad,
    grad_x,
    sums,
    tokens,
    channels,
    row,
    grad_row,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    RUN: tl.constexpr,
    STRIP: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * RUN + tl.zeros((1,), tl.int64)  # numbers of one kind: a block
    column = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    wide = column < channels
    w0 = _tap(weight, column, wide, 0, WIDTH, STRIP)
    w1 = _tap(weight, column, wide, 1, WIDTH, STRIP)
    w2 = _tap(weight, column, wide, 2, WIDTH, STRIP)
    w3 = _tap(weight, column, wide, 3, WIDTH, STRIP)
    added = tl.zeros((STRIP,), tl.float32)
    if BIASED:
        added = tl.load(bias + column, mask=wide, other=0.0).to(tl.float32)
    # The inputs before this token, and what is known so far of their gradients.
    x1 = tl.load(x + (begin - 1) * row + column, mask=wide & (begin >= 1), other=0.0).to(tl.float32)
    x2 = tl.load(x + (begin - 2) * row + column, mask=wide & (begin >= 2), other=0.0).to(tl.float32)
    x3 = tl.load(x + (begin - 3) * row + column, mask=wide & (begin >= 3), other=0.0).to(tl.float32)
    g1 = tl.zeros((STRIP,), tl.float32)
    g2 = tl.zeros((STRIP,), tl.float32)
    g3 = tl.zeros((STRIP,), tl.float32)
    s0 = tl.zeros((STRIP,), tl.float32)
    s1 = tl.zeros((STRIP,), tl.float32)
    s2 = tl.zeros((STRIP,), tl.float32)
    s3 = tl.zeros((STRIP,), tl.float32)
    s4 = tl.zeros((STRIP,), tl.float32)
    for i in range(RUN + 3):
        token = begin + i
        here = token < tokens
        before = tl.load(place + token, mask=here, other=0)
        x0 = tl.load(x + token * row + column, mask=wide & here, other=0.0).to(tl.float32)
        along = tl.load(grad + token * grad_row + column, mask=wide & here, other=0.0).to(tl.float32)
        r1 = tl.where(before >= 1, x1, 0.0)
        r2 = tl.where(before >= 2, x2, 0.0)
        r3 = tl.where(before >= 3, x3, 0.0)
        if SILU:
            total = added + x0 * w0 + r1 * w1 + r2 * w2 + r3 * w3
            share = tl.sigmoid(total)
            along = along * share * (1.0 + total * (1.0 - share))
        g3 += tl.where(before >= 3, along * w3, 0.0)
        g2 += tl.where(before >= 2, along * w2, 0.0)
        g1 += tl.where(before >= 1, along * w1, 0.0)
        done = (token - 3 >= begin) & (token - 3 < tokens)
        tl.store(grad_x + (token - 3) * channels + column, g3.to(grad_x.dtype.element_ty), mask=wide & done)
        own = tl.where(i < RUN, along, 0.0)
        s0 += own * x0
        s1 += own * r1
        s2 += own * r2
        s3 += own * r3
        s4 += own
        g3, g2, g1 = g2, g1, along * w0
        x3, x2, x1 = x2, x1, x0
    to = sums + tl.program_id(0).to(tl.int64) * (WIDTH + 1) * channels + column
    tl.store(to, s4, mask=wide)
    tl.store(to + WIDTH * channels, s0, mask=wide)
    if WIDTH > 1:
        tl.store(to + (WIDTH - 1) * channels, s1, mask=wide)
    if WIDTH > 2:
        tl.store(to + (WIDTH - 2) * channels, s2, mask=wide)
    if WIDTH > 3:
        tl.store(to + (WIDTH - 3) * channels, s3, mask=wide)


@torch.library.custom_op("siirl::convolved", mutates_args=())
def convolved(x_NC: Tensor, weight_CW: Tensor, bias: Tensor | None, place_N1: Tensor, silu: bool) -> Tensor:
    """The convolution of each channel within each segment, and its SiLU: [N, C] -> [N, C].

    place_N1: int32, the place of each token in its segment. W is at most WIDEST.
    """
    x_NC, weight_CW = _rows(x_NC), weight_CW.contiguous()
    (tokens, channels), width = x_NC.shape, weight_CW.shape[1]
    assert width <= WIDEST
    out_NC = x_NC.new_empty(tokens, channels)
    _forward[(triton.cdiv(tokens, ROWS), triton.cdiv(channels, COLUMNS))](
        *(x_NC, weight_CW, weight_CW if bias is None else bias, place_N1, out_NC),
        *(tokens, channels, x_NC.stride(0), width, silu, bias is not None, ROWS, COLUMNS),
        num_warps=4,
    )
    return out_NC


@convolved.register_fake
def _(x_NC: Tensor, weight_CW: Tensor, bias: Tensor | None, place_N1: Tensor, silu: bool) -> Tensor:
    return x_NC.new_empty(x_NC.shape)


@torch.library.custom_op("siirl::convolved_backward", mutates_args=())
def convolved_backward(
    grad_NC: Tensor, x_NC: Tensor, weight_CW: Tensor, bias: Tensor | None, place_N1: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the inputs, and of bias and weights in float32: [N, C], [R, 1 + W, C] of each run."""
    x_NC, grad_NC, weight_CW = _rows(x_NC), _rows(grad_NC), weight_CW.contiguous()
    (tokens, channels), width = x_NC.shape, weight_CW.shape[1]
    runs = triton.cdiv(tokens, RUN)
    grad_x_NC = x_NC.new_empty(tokens, channels)
    sums = x_NC.new_empty(runs, 1 + width, channels, dtype=torch.float32)
    _backward[(runs, triton.cdiv(channels, STRIP))](
        *(x_NC, weight_CW, weight_CW if bias is None else bias, place_N1, grad_NC, grad_x_NC, sums),
        *(tokens, channels, x_NC.stride(0), grad_NC.stride(0), width, silu, bias is not None, RUN, STRIP),
        num_warps=1,
    )
    return grad_x_NC, sums


@convolved_backward.register_fake
def _(
    grad_NC: Tensor, x_NC: Tensor, weight_CW: Tensor, bias: Tensor | None, place_N1: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    runs, sums = triton.cdiv(x_NC.shape[0], RUN), 1 + weight_CW.shape[1]
    return x_NC.new_empty(x_NC.shape), x_NC.new_empty(runs, sums, x_NC.shape[1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor, bool], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad_NC: Tensor) -> tuple[Tensor | None, ...]:
    x_NC, weight_CW, bias, place_N1 = ctx.saved_tensors
    grad_x_NC, sums = convolved_backward(grad_NC, x_NC, weight_CW, bias, place_N1, ctx.silu)
    of_bias_C, of_weight_WC = sums.sum(0).split([1, weight_CW.shape[1]])
    of_weight_CW = of_weight_WC.T.to(weight_CW.dtype)
    return grad_x_NC, of_weight_CW, None if bias is None else of_bias_C[0].to(bias.dtype), None, None


convolved.register_autograd(_gradients, setup_context=_keep)


def _rows(x_NC: Tensor) -> Tensor:
    """As it lies if channels are beside one another, as those of a part of a wider projection are."""
    return x_NC if x_NC.stride(1) == 1 else x_NC.contiguous()
