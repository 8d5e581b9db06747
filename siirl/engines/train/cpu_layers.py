"""Parts of transformers' layers, of which there is no one kernel on the CPU, in fewer passes over memory.

There each operation of a norm reads and writes all tokens, and autograd as many again. Here a norm and a
rotary embedding are a function each, with a backward of its own. What a norm gives is the same bit for bit,
the rest up to rounding.

Legend: N tokens, D features.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

ROTARY = "apply_rotary_pos_emb"


def use_cpu_layers(model: PreTrainedModel) -> None:
    """Have the norms and rotary embeddings of a model computed in few passes, in fp32 on the CPU.

    Those whose code is that of Llama's, as transformers writes it into the file of each model; others stay.
    """
    for module in model.modules():
        forward = getattr(type(module), "forward", None)
        if _is_same(forward, modeling_llama.LlamaRMSNorm.forward):
            module.forward = partial(_norm, module)
        elif isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names:
            names = forward.__globals__
            found = inspect.unwrap(names[ROTARY])
            if _is_same(found, inspect.unwrap(modeling_llama.apply_rotary_pos_emb)) and _is_same(
                found.__globals__["rotate_half"], modeling_llama.rotate_half
            ):
                module.forward = MethodType(_with(forward, **{ROTARY: partial(_rotated, found)}), module)


def _is_same(one: Any, other: FunctionType) -> bool:
    """Whether two functions do the same, whatever their files call them."""
    return isinstance(one, FunctionType) and _code(one) == _code(other)


def _code(function: FunctionType) -> tuple[Any, ...]:
    code = function.__code__
    numbers = tuple(value for value in code.co_consts if not isinstance(value, str))
    return code.co_code, code.co_names, code.co_varnames, numbers


def _with(function: FunctionType, **names: Any) -> FunctionType:
    """The function, which finds these objects under names of its file."""
    made = FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _is_plain(*tensors: Tensor) -> bool:
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)


def _norm(module: nn.Module, hidden: Tensor) -> Tensor:
    if not _is_plain(hidden, module.weight):
        return type(module).forward(module, hidden)
    return RMSNorm.apply(hidden, module.weight, module.variance_epsilon)


def _rotated(
    original: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    if not _is_plain(q, k, cos, sin):
        return original(q, k, cos, sin, unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotary.apply(q, cos, sin), Rotary.apply(k, cos, sin)


class RMSNorm(torch.autograd.Function):
    """(x [..., D], weight [D], epsilon) -> w x / r with r = sqrt(mean x^2 + epsilon), [..., D].

    With g the gradient: that of x is w g / r - x mean(w g x) / r^3, that of w the sum of g x / r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        out = x * x
        scale = out.mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return torch.mul(x, scale, out=out).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, scale = ctx.saved_tensors
        size = x.shape[-1]
        x_ND, grad_ND, scale_N1 = x.reshape(-1, size), grad.reshape(-1, size), scale.view(-1, 1)
        into_ND = grad_ND * x_ND
        grad_weight_D = torch.mv(into_ND.t(), scale_N1[:, 0]) if ctx.needs_input_grad[1] else None
        back_N1 = torch.mv(into_ND, weight_D).unsqueeze(1).mul_(scale_N1.pow(3)).div_(-size)
        torch.mul(grad_ND, weight_D, out=into_ND).mul_(scale_N1).addcmul_(x_ND, back_N1)
        return into_ND.view(x.shape), grad_weight_D, None


class Rotary(torch.autograd.Function):
    """(x, cos, sin, which broadcast to it) -> x cos + half(x) sin, half(x) = (-second half, first half).

    The gradient goes back by the transpose of half.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out, (sin_1, sin_2) = x * cos, sin.chunk(2, -1)
        _add_turned_(out, x, -sin_1, sin_2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        into, (sin_1, sin_2) = grad * cos, sin.chunk(2, -1)
        _add_turned_(into, grad, sin_2, -sin_1)
        return into, None, None


def _add_turned_(out: Tensor, x: Tensor, by_1: Tensor, by_2: Tensor) -> None:
    """The first half of out gets the second of x times by_1, the second the first times by_2."""
    (out_1, out_2), (x_1, x_2) = out.chunk(2, -1), x.chunk(2, -1)
    out_1.addcmul_(x_2, by_1)
    out_2.addcmul_(x_1, by_2)
