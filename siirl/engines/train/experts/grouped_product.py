"""Rows times the weight of their expert, rows of one expert after another.

Legend: S rows, E experts, D input and O output features.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

if torch.cuda.is_available():
    from siirl.engines.train.experts import expert_kernels
else:
    expert_kernels = None

GROUPED_MULTIPLE = 8
"""What the sides of the weights of torch's grouped product are multiples of: 16 bytes."""


def expert_by_expert(x_SD: Tensor, weights_OD: Iterable[Tensor], counts: Sequence[int]) -> Tensor:
    """[S, O]; counts: rows of each expert."""
    parts = zip(x_SD.split(list(counts)), weights_OD, strict=True)
    return torch.cat([rows @ weight_OD.t() for rows, weight_OD in parts])


class GroupedProduct(torch.autograd.Function):
    """(x [S, D], ends [E], int32: where the rows of each expert end, weights) -> [S, O], in bf16.

    weights: [E, O, D], or [O, D] for each expert. These are copied together for every product: a few hundred
    megabytes, less than a millisecond on a GPU. torch._grouped_mm leaves the gradient of an expert without
    rows memory that nobody wrote to on some devices (pytorch/pytorch#172439): it is zero here.
    """

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, ends_E: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_SD, ends_E, *weights)
        return torch._grouped_mm(x_SD, _fused(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, ...]:
        x_SD, ends_E, *weights = ctx.saved_tensors
        grad_SO = grad_SO.contiguous()
        grad_x, grads = None, [None] * len(weights)
        if ctx.needs_input_grad[0]:
            grad_x = torch._grouped_mm(grad_SO, _fused(weights), offs=ends_E)
        if any(ctx.needs_input_grad[2:]):
            grad_EOD = torch._grouped_mm(grad_SO.t(), x_SD, offs=ends_E)
            clear_idle_(grad_EOD, ends_E)
            grads = [grad_EOD] if weights[0].dim() == 3 else grad_EOD.unbind()
        return grad_x, None, *grads


def clear_idle_(grad_EOD: Tensor, ends_E: Tensor) -> None:
    """Zeros for the experts without rows; ends_E: where those of each end."""
    if expert_kernels is not None and grad_EOD.is_cuda and grad_EOD.is_contiguous():
        expert_kernels.clear_idle_(grad_EOD, ends_E)
        return
    is_idle_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
    grad_EOD.masked_fill_(is_idle_E[:, None, None], 0.0)


def _fused(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if weights[0].dim() == 3 else torch.stack(tuple(weights))
