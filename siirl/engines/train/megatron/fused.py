"""What stands between the matrix products of a layer in few passes over memory: norms, heads, gated units.

Each function below and each backward is one compiled graph on a GPU, and plain torch elsewhere. All compute
in fp32 and round once. Legend: N packed tokens, W features of a tensor, D head size, R features of a head
that are turned, K groups of heads (queries, then the key and the value that they share), F width of an MLP.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

_OPTIONS = {
    "max_pointwise_cat_inputs": 0,
    "max_complex_pointwise_cat_inputs": 0,
    "realize_reads_threshold": 32,
}
"""The parts of a joined tensor are written where they belong, not computed by masks at all of its places; and
what is read often within a kernel stays in it."""
_OPTIONS = {name: value for name, value in _OPTIONS.items() if hasattr(torch._inductor.config, name)}


def compiled(function: Callable) -> Callable:
    """The function, compiled where its first argument is on a GPU: for any number of tokens, and once for
    each value of the other sizes and constants. It is no part of autograd.

    Tensors of more than one dimension have the tokens first. `by_compiler` runs it compiled everywhere.
    """
    inductor = torch.compile(function, dynamic=False, options=_OPTIONS)

    def by_compiler(*args: Any) -> Any:
        plain = [x.detach() if isinstance(x, Tensor) else x for x in args]
        for x in plain:
            if isinstance(x, Tensor) and x.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return inductor(*plain)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return (by_compiler if args[0].is_cuda else function)(*args)

    run.by_compiler = by_compiler
    return run


def _scale(weight_W: Tensor, from_one: bool) -> Tensor:
    return 1.0 + weight_W.float() if from_one else weight_W.float()


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Features over their root mean square, and what they were multiplied with."""
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * inverse, inverse


def _through_unit(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of what _unit was given, from that of what it gave."""
    return (grad - unit * (grad * unit).mean(-1, keepdim=True)) * inverse


@compiled
def _norm(x: Tensor, weight_W: Tensor, eps: float, from_one: bool) -> tuple[Tensor, Tensor]:
    unit, inverse = _unit(x.float(), eps)
    return (unit * _scale(weight_W, from_one)).type_as(x), inverse


@compiled
def _sum_norm(
    x: Tensor, stream: Tensor, weight_W: Tensor, eps: float, from_one: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total = stream + x
    unit, inverse = _unit(total.float(), eps)
    return total, (unit * _scale(weight_W, from_one)).type_as(x), inverse


@compiled
def _norm_backward(
    grad: Tensor,
    of_stream: Tensor | None,
    x: Tensor,
    inverse: Tensor,
    weight_W: Tensor,
    from_one: bool,
    trained: bool,
) -> tuple[Tensor, Tensor | None]:
    """Of x, of_stream added to it, and of the weight where it is trained."""
    unit, wide = x.float() * inverse, grad.float()
    back = _through_unit(wide * _scale(weight_W, from_one), unit, inverse)
    if of_stream is not None:
        back = back + of_stream.float()
    of_weight = (wide * unit).flatten(0, -2).sum(0).type_as(weight_W) if trained else None
    return back.type_as(x), of_weight


class StreamNorm(torch.autograd.Function):
    """(x or what a layer's part gave, the stream that it is added to or None, weight, epsilon, whether the
    weight counts from one) -> (the stream, its RMS norm)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stream: Tensor | None, weight_W: Tensor, eps: float, from_one: bool
    ) -> tuple[Tensor, Tensor]:
        if stream is None:
            total, (normed, inverse) = x, _norm(x, weight_W, eps, from_one)
        else:
            total, normed, inverse = _sum_norm(x, stream, weight_W, eps, from_one)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, inverse, weight_W)
        ctx.from_one = from_one
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_stream, of_normed = grads
        of_x, of_weight = of_stream, None
        if of_normed is not None:
            of_x, of_weight = _norm_backward(
                of_normed, of_stream, *ctx.saved_tensors, ctx.from_one, ctx.needs_input_grad[2]
            )
        return of_x, of_x if ctx.needs_input_grad[1] else None, of_weight, None, None


def rotated(x: Tensor, cos_NR: Tensor, sin_NR: Tensor, neighbours: bool = False) -> Tensor:
    """Rotary embedding of the first R features of x [N, ..., D]; i and i + R/2 are turned together, or
    neighbours."""
    size = cos_NR.shape[-1]
    turned, kept = x.split([size, x.shape[-1] - size], dim=-1)
    if neighbours:
        cos_NR, sin_NR = (table[..., : size // 2].repeat_interleave(2, dim=-1) for table in (cos_NR, sin_NR))
    cos, sin = (table.view(-1, *[1] * (x.dim() - 2), size) for table in (cos_NR, sin_NR))
    out = turned * cos + _across(turned, neighbours) * sin
    return torch.cat([out, kept], dim=-1) if kept.shape[-1] else out


def _across(x: Tensor, neighbours: bool) -> Tensor:
    """Each pair (a, b) of features as (-b, a)."""
    half = x.shape[-1] // 2
    place = torch.arange(2 * half, device=x.device)
    first = place % 2 == 0 if neighbours else place < half
    swapped = x.unflatten(-1, (half, 2) if neighbours else (2, half)).flip(-1 if neighbours else -2)
    swapped = swapped.flatten(-2)
    return torch.where(first, -swapped, swapped)


def _unrotated(grad: Tensor, cos_NR: Tensor, sin_NR: Tensor, neighbours: bool) -> Tensor:
    """The gradient of what `rotated` was given: turned back, as cosines and sines of a pair are the same."""
    return rotated(grad, cos_NR, -sin_NR, neighbours)


class Heads(NamedTuple):
    """How the heads of a product are made, the same for all tokens."""

    groups: int
    size: int
    neighbours: bool
    eps: float
    from_one: bool
    """Of the norms of queries and keys, where there are some."""


def heads_of_groups(mixed: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, K, H / K, D], keys and values [N, K, 1, D] of a product [N, 1, W]."""
    every = mixed.view(len(mixed), groups, -1, size)
    return every.split([every.shape[2] - 2, 1, 1], dim=2)


@compiled
def _heads(
    mixed: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    query_D: Tensor | None,
    key_D: Tensor | None,
    groups: int,
    size: int,
    neighbours: bool,
    eps: float,
    from_one: bool,
) -> tuple[Tensor | None, ...]:
    """Queries, keys, and what their norms multiplied with."""
    found, inverses = [], []
    for part, weight_D in zip(heads_of_groups(mixed, groups, size), (query_D, key_D), strict=False):
        x, inverse = part.float(), None
        if weight_D is not None:
            unit, inverse = _unit(x, eps)
            x = unit * _scale(weight_D, from_one)
        x = rotated(x, cos_NR.float(), sin_NR.float(), neighbours)
        found.append(x.type_as(mixed).reshape(len(mixed), -1, size))
        inverses.append(inverse)
    return *found, *inverses


@compiled
def _heads_backward(
    of_query: Tensor,
    of_key: Tensor,
    of_value: Tensor,
    mixed: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    query_D: Tensor | None,
    key_D: Tensor | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    groups: int,
    size: int,
    neighbours: bool,
    from_one: bool,
    trained: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of the product, and of the weights of the norms where they are trained."""
    found, of_weights = [], []
    parts = heads_of_groups(mixed, groups, size)
    norms = ((query_D, of_queries), (key_D, of_keys))
    for part, (weight_D, inverse), grad in zip(parts, norms, (of_query, of_key), strict=False):
        back = _unrotated(grad.view(part.shape).float(), cos_NR.float(), sin_NR.float(), neighbours)
        of_weight = None
        if weight_D is not None and inverse is not None:
            unit = part.float() * inverse
            if trained:
                of_weight = (back * unit).flatten(0, -2).sum(0).type_as(weight_D)
            back = _through_unit(back * _scale(weight_D, from_one), unit, inverse)
        found.append(back.type_as(mixed))
        of_weights.append(of_weight)
    found.append(of_value.view(parts[2].shape))
    return torch.cat(found, dim=2).view(mixed.shape), *of_weights


class TurnedHeads(torch.autograd.Function):
    """(product [N, 1, W], cosines and sines [N, R], weights [D] of norms of queries and keys or None, how)
    -> queries [N, H, D] and keys [N, K, D], normed and turned, and values [N, K, D]: part of the product."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        cos_NR: Tensor,
        sin_NR: Tensor,
        query_D: Tensor | None,
        key_D: Tensor | None,
        how: Heads,
    ) -> tuple[Tensor, ...]:
        query, key, *inverses = _heads(mixed, cos_NR, sin_NR, query_D, key_D, *how)
        ctx.save_for_backward(mixed, cos_NR, sin_NR, query_D, key_D, *inverses)
        ctx.how = how
        return query, key, heads_of_groups(mixed, how.groups, how.size)[2].squeeze(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        how, trained = ctx.how, ctx.needs_input_grad[3]
        of_mixed, *of_weights = _heads_backward(
            *(x.contiguous() for x in grads),
            *ctx.saved_tensors,
            *(how.groups, how.size, how.neighbours, how.from_one, trained),
        )
        return of_mixed, None, None, *of_weights, None


@compiled
def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return (silu(gate.float()) * up.float()).type_as(both)


@compiled
def _gated_backward(grad: Tensor, both: Tensor) -> Tensor:
    gate, up = (x.float() for x in both.chunk(2, dim=-1))
    share, wide = torch.sigmoid(gate), grad.float()
    of_gate = wide * up * share * (1.0 + gate * (1.0 - share))
    return torch.cat([of_gate.type_as(both), (wide * gate * share).type_as(both)], dim=-1)


class GatedUnit(torch.autograd.Function):
    """Gates and inputs of a SwiGLU beside each other, [..., 2F] -> [..., F]."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return _gated(both)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _gated_backward(grads[0], *ctx.saved_tensors)


def gated_unit(both: Tensor, bias: None, *_: Any) -> Tensor:
    """In the place of megatron-core's function, whose backward reads everything twice."""
    assert bias is None, "an MLP with biases"
    return GatedUnit.apply(both)


@compiled
def _clamped(both: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = both.float().unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1.0) * gate * torch.sigmoid(alpha * gate)).type_as(both)


@compiled
def _clamped_backward(grad: Tensor, both: Tensor, alpha: float, limit: float) -> Tensor:
    whole_gate, whole_up = both.float().unflatten(-1, (-1, 2)).unbind(-1)
    gate, up, wide = whole_gate.clamp(max=limit), whole_up.clamp(-limit, limit), grad.float()
    share = torch.sigmoid(alpha * gate)
    of_gate = wide * (up + 1.0) * share * (1.0 + alpha * gate * (1.0 - share)) * (whole_gate <= limit)
    of_up = wide * gate * share * (whole_up.abs() <= limit)
    return torch.stack([of_gate, of_up], dim=-1).flatten(-2).type_as(both)


class ClampedUnit(torch.autograd.Function):
    """(each gate beside its input, [..., 2F], alpha, limit) -> [..., F]: (input + 1) gate sigmoid(alpha gate)
    of what no limit is passed of. Source: OpenAI, "gpt-oss-120b & gpt-oss-20b model card" (2025), 2.2."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(both)
        ctx.how = alpha, limit
        return _clamped(both, alpha, limit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _clamped_backward(grads[0], *ctx.saved_tensors, *ctx.how), None, None


@compiled
def _squares(x: Tensor) -> Tensor:
    return x.flatten(1).float().square().sum(1, keepdim=True)


@compiled
def _whole_norm(
    x: Tensor, square_N1: Tensor, weight_W: Tensor, width: int, eps: float
) -> tuple[Tensor, Tensor]:
    """x of some of the features over the root mean square of all `width`, and what it was multiplied with."""
    inverse_N1 = torch.rsqrt(square_N1 / width + eps)
    return (x.flatten(1).float() * inverse_N1 * weight_W.float()).type_as(x).view(x.shape), inverse_N1


@compiled
def _along(grad: Tensor, x: Tensor, weight_W: Tensor, inverse_N1: Tensor) -> Tensor:
    """Each token's gradient of what is normed, in the direction of this."""
    along = grad.flatten(1).float() * weight_W.float() * x.flatten(1).float()
    return along.sum(1, keepdim=True) * inverse_N1


@compiled
def _whole_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight_W: Tensor,
    inverse_N1: Tensor,
    along_N1: Tensor,
    width: int,
    trained: bool,
) -> tuple[Tensor, Tensor | None]:
    """Of x, and of the weight where it is trained."""
    unit, wide = x.flatten(1).float() * inverse_N1, grad.flatten(1).float()
    back = (wide * weight_W.float() - unit * (along_N1 / width)) * inverse_N1
    return back.type_as(x).view(x.shape), (wide * unit).sum(0).type_as(weight_W) if trained else None


class WholeNorms(torch.autograd.Function):
    """(queries [N, H, D], keys [N, K, D], their weights [H D] and [K D], epsilon, tensor-parallel ranks) ->
    both, each over the root mean square of the heads of all ranks. Collective over these."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_W: Tensor,
        key_W: Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        widths = [weight_W.numel() * group.size() for weight_W in (query_W, key_W)]
        squares = _summed([_squares(query), _squares(key)], group)
        query_out, of_query = _whole_norm(query, squares[0], query_W, widths[0], eps)
        key_out, of_key = _whole_norm(key, squares[1], key_W, widths[1], eps)
        ctx.save_for_backward(query, query_W, of_query, key, key_W, of_key)
        ctx.widths, ctx.group = widths, group
        return query_out, key_out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, trained = ctx.saved_tensors, ctx.needs_input_grad[2]
        grads = tuple(grad.contiguous() for grad in grads)
        parts = (saved[:3], saved[3:])
        along = _summed([_along(grad, *part) for grad, part in zip(grads, parts, strict=True)], ctx.group)
        (of_query, of_query_W), (of_key, of_key_W) = (
            _whole_norm_backward(grad, *part, along_N1, width, trained)
            for grad, part, along_N1, width in zip(grads, parts, along, ctx.widths, strict=True)
        )
        return of_query, of_key, of_query_W, of_key_W, None, None


def _summed(parts: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Numbers of tokens [N, 1] of queries and of keys, those of all ranks added up."""
    total = torch.stack(parts)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
