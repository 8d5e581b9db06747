"""Linear layers that multiply in FP8: numbers of 8 bits, with a scale for each row that a sum runs along.

Legend: N tokens, D input and O output features.

A row is divided by what brings its largest number to 448, and rounded to float8_e4m3fn. Forward, rows of
tokens meet rows of the weight: what a token gives does not depend on the tokens beside it, and is what vLLM
gives with rollout.quantization=fp8, which rounds so, too. Backward, the gradient of the input is that of the
product with the weight as it was rounded; the gradient of the weight is not rounded.

Source: the recipe "rowwise_with_gw_hp" of torchao 0.17 (Meta, BSD licence), but for its scales, which are
powers of two, and for the weight, which it rounds otherwise in the backward pass. Sums are those of
torch._scaled_mm.
"""

from typing import Any

import torch
from torch import Tensor, nn

from siirl.compiler.checks.model_checks import FLOAT8_MULTIPLE
from siirl.errors import ConfigError, NotSupportedError

FP8 = torch.float8_e4m3fn
CAPABILITY = (8, 9)
"""CUDA's compute capability from which devices multiply in FP8."""
LARGEST = 448.0
"""Of float8_e4m3fn."""
LEAST = 2.0**-100
"""A row with nothing larger is rounded as if it had this."""


def rounded(x_ND: Tensor, by_D: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x, times by_D, in FP8 [N, D], and what each row is to be multiplied by again, fp32 [N, 1])."""
    if x_ND.is_cuda:
        from siirl.engines.train.triton_kernels import rounded_on_gpu

        return rounded_on_gpu(x_ND, by_D)
    value_ND = x_ND.float() if by_D is None else x_ND.float() * by_D
    scale_N1 = value_ND.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LARGEST
    return (value_ND / scale_N1).to(FP8), scale_N1


class Float8Product(torch.autograd.Function):
    """(x [N, D], weight [O, D]) -> x weight^T [N, O], in the type of x; each dimension but N of 16s."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_OD)
        (x8_ND, scale_N1), (weight8_OD, scale_O1) = rounded(x_ND), rounded(weight_OD)
        return _product(x8_ND, scale_N1, weight8_OD.t(), scale_O1.t(), x_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_ND, weight_OD = ctx.saved_tensors
        grad_NO, grad_ND, grad_OD = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            weight8_OD, scale_O1 = rounded(weight_OD)
            grad8_NO, scale_N1 = rounded(grad_NO, scale_O1.squeeze(1))
            by_columns_OD = weight8_OD.t().contiguous().t()
            ones_1D = scale_N1.new_ones(1, weight_OD.shape[1])
            grad_ND = _product(grad8_NO, scale_N1, by_columns_OD, ones_1D, x_ND.dtype)
        if ctx.needs_input_grad[1]:
            grad_OD = grad_NO.t() @ x_ND
        return grad_ND, grad_OD


def _product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=True)


class Float8Linear(nn.Linear):
    """A linear layer whose weight is as it was, and whose product is Float8Product."""

    def forward(self, input: Tensor) -> Tensor:
        x_ND = input.reshape(-1, self.in_features).contiguous()
        out = Float8Product.apply(x_ND, self.weight).view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def use_float8(blocks: list[nn.Module], device: torch.device) -> None:
    """Have the linear layers of a model's blocks multiply in FP8, in place; weights and names stay.

    ConfigError for a device that cannot; NotSupportedError for a layer whose sizes FP8 products do not have,
    or if there is none.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ConfigError(
            f"fsdp_config.float8=True: {torch.cuda.get_device_name(device)} multiplies in no FP8. Set it to "
            "false."
        )
    layers = [layer for block in blocks for layer in block.modules() if type(layer) is nn.Linear]
    sizes = {size for layer in layers for size in layer.weight.shape}
    odd = sorted(size for size in sizes if size % FLOAT8_MULTIPLE)
    if odd or not layers:
        why = f"a linear layer has a side of {odd[0]}" if odd else "the blocks have no plain linear layers"
        raise NotSupportedError(
            f"not supported yet: fsdp_config.float8=True: {why}; FP8 products are of linear layers whose "
            f"sides are multiples of {FLOAT8_MULTIPLE}. Set it to false."
        )
    for layer in layers:
        layer.__class__ = Float8Linear
