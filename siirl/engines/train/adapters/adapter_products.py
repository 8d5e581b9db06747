"""What an adapter adds to a linear layer, in the product that makes it: y = W x + scale * B A x.

The output is read and written once by a matrix product, which scales, too; peft's layers scale what they
add, and add it, in passes of their own. The same in the backward pass, for the gradient of the input. What
is scaled in a compiled layer are the R numbers of a token, and so they are where several adapters lie side by
side: each token has a scale for each of the R numbers, which is 0 for those of other adapters than its own.

Legend: N tokens, I inputs, O outputs, R rank.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from siirl.engines.train.layer_compiler import compute_by

Pair = tuple[Tensor, Tensor]
"""A [R, I] and B [O, R]."""
Beside = tuple[Tensor, Tensor, Tensor]
"""A and B of several adapters, and the scale of each number of each token, [N, R]."""


def add_adapter(out_NO: Tensor, x_NI: Tensor, pair: Pair, scale: float) -> Tensor:
    """Add scale * B A x to the output; x A, [N, R], for the gradient of B."""
    low_NR = linear(x_NI, pair[0])
    out_NO.addmm_(low_NR, pair[1].t(), alpha=scale)
    return low_NR


def add_gradient(grad_NI: Tensor | None, grad_NO: Tensor, pair: Pair, scale: float) -> Tensor:
    """Add the adapter's part of an input's gradient, if there is one; B of the output's, [N, R]."""
    back_NR = torch.mm(grad_NO, pair[1])
    if grad_NI is not None:
        grad_NI.addmm_(back_NR, pair[0], alpha=scale)
    return back_NR


class _AdaptedLinear(torch.autograd.Function):
    """(x [.., I], W, bias or None, A, B, scale or [N, R]) -> [.., O]; W and the bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float | Tensor
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        out_NO = linear(x_NI, weight, bias)
        if isinstance(scale, Tensor):
            low_NR = linear(x_NI, a).mul_(scale)
            out_NO.addmm_(low_NR, b.t())
        else:
            low_NR = add_adapter(out_NO, x_NI, (a, b), scale)
        ctx.save_for_backward(x_NI, weight, a, b, low_NR)
        ctx.scale, ctx.shape = scale, x.shape
        return out_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, a, b, low_NR = ctx.saved_tensors
        grad_NO = grads[0].reshape(-1, len(weight))
        grad_NI = grad_NO @ weight if ctx.needs_input_grad[0] else None
        if isinstance(ctx.scale, Tensor):
            back_NR = torch.mm(grad_NO, b).mul_(ctx.scale)
            if grad_NI is not None:
                grad_NI.addmm_(back_NR, a)
            of_a, of_b = back_NR.t() @ x_NI, grad_NO.t() @ low_NR
        else:
            back_NR = add_gradient(grad_NI, grad_NO, (a, b), ctx.scale)
            of_a, of_b = (back_NR.t() @ x_NI) * ctx.scale, (grad_NO.t() @ low_NR) * ctx.scale
        return None if grad_NI is None else grad_NI.view(ctx.shape), None, None, of_a, of_b, None


def add_in_products(model: nn.Module, adapter: str) -> None:
    """Have peft's adapted linear layers of a model compute so."""
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), nn.Linear):
            compute_by(module, _forward_of(adapter))


@functools.cache
def _forward_of(adapter: str) -> Callable[[Any, Tensor], Tensor]:
    """One for all models of a process, which share what the compiler makes of alike layers."""
    return lambda layer, x: _forward(layer, adapter, x)


def _forward(layer: Any, adapter: str, x: Tensor) -> Tensor:
    base, a, b = layer.base_layer, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    scale = layer.scaling[adapter]
    if torch.compiler.is_compiling() or type(base).forward is not nn.Linear.forward:
        # A compiled layer adds in the kernel of what comes next, and merges the products of one input.
        return base(x) + linear(linear(x, a) * scale, b)
    return _AdaptedLinear.apply(x, base.weight, base.bias, a, b, scale)


def compute_beside(layer: Any, x: Tensor) -> Tensor:
    """The forward of a linear layer with several adapters, which are its attribute `beside`. Compiled, the
    graph is that of `_forward`, and the same for any number of adapters and ranks."""
    a, b, scale_NR = layer.beside
    if torch.compiler.is_compiling():
        return linear(x, layer.weight, layer.bias) + linear(linear(x, a) * scale_NR, b)
    return _AdaptedLinear.apply(x, layer.weight, layer.bias, a, b, scale_NR)
