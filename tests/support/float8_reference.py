"""Linear layers in FP8 as their recipe says it, in float64 without FP8 products: what ours are held to."""

import math

import torch
from torch import Tensor, nn

DIGITS, LARGEST, LEAST_EXPONENT = 3, 448.0, -6
"""Of e4m3: binary digits after the first one, the largest number, the least exponent of a full number."""


def rounded_number(value: float) -> float:
    """A number of at most 448 to the nearest one that e4m3 has, to even digits in the middle of two."""
    if value == 0.0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), LEAST_EXPONENT)
    step = 2.0 ** (exponent - DIGITS)
    return round(value / step) * step


def scales(x: Tensor) -> Tensor:
    """What each row is divided by, in the float32 that it is kept in."""
    return x.detach().float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / LARGEST


def rounded_rows(x: Tensor) -> Tensor:
    """The numbers that FP8 leaves of each row, in float64."""
    scale = scales(x)
    x = (x.detach().float() / scale).double()
    step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**LEAST_EXPONENT))) - DIGITS)
    return torch.round(x / step) * step * scale.double()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (rounded_rows(x) @ rounded_rows(weight).t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        scale = scales(weight)
        unscaled = rounded_rows(weight) / scale.double()
        grad_x = rounded_rows(grad.float() * scale.t()) @ unscaled
        grad_weight = grad.double().flatten(0, -2).t() @ x.double().flatten(0, -2)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class ReferenceLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = _Product.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


def with_reference_layers(model: nn.Module) -> nn.Module:
    """A Hugging Face model whose blocks multiply so, in place."""
    kinds = set(model._no_split_modules)
    for block in (module for module in model.modules() if type(module).__name__ in kinds):
        for layer in block.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = ReferenceLinear
    return model
