"""Linear layers of a frozen model that many adapters use in one pass, each on tokens of its own.

A pass has the tokens of several segments, one behind the other; a segment has an adapter, or none. On a CPU
each segment is multiplied by itself, so that what comes of it, to the last bit, is what comes of it alone:
how a product rounds depends on its number of rows. Elsewhere the base multiplies all tokens at once, and so
do the adapters of several segments, side by side in one matrix of their ranks together, of which a token
keeps the columns of its own (Chen et al., "Punica" (2023), has kernels for the same sum).

Legend: N tokens of a pass, r rank of an adapter, R ranks of all adapters of a pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from siirl.engines.train.adapters.adapter_products import add_adapter, add_gradient
from siirl.engines.train.adapters.lora import linear_layers

Shapes = dict[str, tuple[int, int]]
"""Layer -> (out, in) of its weight."""
Pairs = dict[str, tuple[Tensor, Tensor]]
"""Layer -> A and B, or their gradients."""


class Adapter:
    """A [r, in] and B [out, r] for each of some layers, as parts of one vector: y = W x + scale * B A x."""

    def __init__(self, shapes: Shapes, rank: int, alpha: float, device: torch.device) -> None:
        """Of zeros."""
        self.rank, self.scale = rank, alpha / rank
        self._shapes = {
            f"{layer}.lora_{part}.weight": shape
            for layer, (wide, deep) in shapes.items()
            for part, shape in (("A", (rank, deep)), ("B", (wide, rank)))
        }
        self.vector = torch.zeros(sum(map(math.prod, self._shapes.values())), device=device)
        self._cast: dict[torch.dtype, Pairs] = {}
        self._gradient: Gradient | None = None

    def parts(self, vector: Tensor) -> dict[str, Tensor]:
        """Name -> its matrix in a vector like that of the weights, in the same memory."""
        pieces = vector.split([math.prod(shape) for shape in self._shapes.values()])
        return {n: one.view(s) for (n, s), one in zip(self._shapes.items(), pieces, strict=True)}

    def pairs(self, vector: Tensor) -> Pairs:
        """The same, by layer."""
        matrices = iter(self.parts(vector).items())
        return {
            name.removesuffix(".lora_A.weight"): (a, b)
            for (name, a), (_, b) in zip(matrices, matrices, strict=False)
        }

    def weights(self, dtype: torch.dtype) -> Pairs:
        """In the type that a pass computes in."""
        if dtype not in self._cast:
            self._cast[dtype] = self.pairs(self.vector.to(dtype))
        return self._cast[dtype]

    def gradient(self) -> "Gradient":
        """Zeros for the gradient of a request, until the next one."""
        if self._gradient is None:
            self._gradient = Gradient(self)
        self._gradient.clear()
        return self._gradient

    def changed(self) -> None:
        """The vector has other numbers."""
        self._cast.clear()

    def draw(self, seed: int) -> None:
        """A uniform in +-1/sqrt(in), as peft draws it, B zeros."""
        drawn = torch.Generator().manual_seed(seed)
        for name, matrix in self.parts(self.vector).items():
            bound = matrix.shape[1] ** -0.5 if ".lora_A" in name else 0.0
            matrix.copy_((2 * torch.rand(matrix.shape, generator=drawn) - 1) * bound)
        self.changed()

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Matrices by name; zeros for a layer that they lack."""
        self.vector.zero_()
        for name, matrix in self.parts(self.vector).items():
            if name in weights:
                matrix.copy_(weights[name])
        self.changed()


class Gradient:
    """Of an adapter: a sum over passes in fp32. Within a pass it is in the type that is computed in, so that
    a product is added where it is made; all of them go into the sum at once."""

    def __init__(self, adapter: Adapter) -> None:
        self.sum = torch.zeros_like(adapter.vector)
        self._adapter = adapter
        self._of_type = {self.sum.dtype: (self.sum, adapter.pairs(self.sum))}

    def clear(self) -> None:
        """All zeros."""
        for vector, _ in self._of_type.values():
            vector.zero_()

    def pair(self, layer: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Where the gradients of A and B are added to in a pass."""
        if dtype not in self._of_type:
            vector = torch.zeros_like(self.sum, dtype=dtype)
            self._of_type[dtype] = vector, self._adapter.pairs(vector)
        return self._of_type[dtype][1][layer]

    def end_pass(self) -> None:
        """Add what a pass has made."""
        for vector, _ in self._of_type.values():
            if vector is not self.sum:
                self.sum.add_(vector)
                vector.zero_()


@dataclass(frozen=True)
class Segment:
    """Tokens of a pass, and the adapter that they are computed with."""

    tokens: slice
    adapter: Adapter | None
    gradient: Gradient | None
    """None in a pass without gradient."""

    def pair(self, layer: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """(A, B), if the layer is adapted."""
        return None if self.adapter is None else self.adapter.weights(dtype).get(layer)


class Segments(list[Segment]):
    """Those of a pass, in the order of their tokens."""

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        super().__init__(segments)
        self._own: dict[tuple[bool, ...], Tensor] = {}

    def own(self, layer: str, num_tokens: int, like: Tensor) -> Tensor:
        """What each token's low numbers are multiplied by, [N, R]: the scale of its adapter in its columns,
        else 0. One for all layers that the same segments adapt."""
        adapted = tuple(one.pair(layer, like.dtype) is not None for one in self)
        if adapted not in self._own:
            mine = [(one.tokens, one.adapter) for one, is_own in zip(self, adapted, strict=True) if is_own]
            own_NR, at = like.new_zeros(num_tokens, sum(adapter.rank for _, adapter in mine)), 0  # type: ignore[union-attr]
            for tokens, adapter in mine:
                assert adapter is not None
                own_NR[tokens, at : at + adapter.rank] = adapter.scale
                at += adapter.rank
            self._own[adapted] = own_NR
        return self._own[adapted]


class AdaptedLayers:
    """The linear layers of a model, but its head, with whatever adapters a pass has."""

    def __init__(self, hf: PreTrainedModel, targets: str | Sequence[str]) -> None:
        """Take the place of what the layers do. targets: as model.target_modules."""
        self.shapes: Shapes = {}
        self.segments = Segments()
        """Of the pass that runs, until its backward pass is over."""
        self._anchor = torch.zeros(1, requires_grad=True)
        for name in linear_layers(hf, targets):
            layer = hf.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            self.shapes[name] = (layer.out_features, layer.in_features)
            layer.forward = partial(self._forward, name, layer)

    def _forward(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        return _Adapted.apply(x, self._anchor, layer.weight, layer.bias, name, self.segments)


class _Adapted(torch.autograd.Function):
    """(x [..., N, in], a tensor with gradient, W, bias, layer, segments) -> [..., N, out]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: str,
        segments: Segments,
    ) -> Tensor:
        x_NI, apart = x.reshape(-1, x.shape[-1]), not x.is_cuda or len(segments) == 1
        found = _forward_apart if apart else _forward_packed
        out_NO, low = found(x_NI, weight, bias, layer, segments)
        ctx.save_for_backward(x_NI, weight, *low)
        ctx.layer, ctx.segments, ctx.shape, ctx.apart = layer, segments, x.shape, apart
        return out_NO.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, *low = ctx.saved_tensors
        grad_NO = grads[0].reshape(-1, len(weight))
        back = _backward_apart if ctx.apart else _backward_packed
        wanted = ctx.needs_input_grad[0]
        grad_NI = back(grad_NO, x_NI, weight, low, ctx.layer, ctx.segments, wanted)
        return None if grad_NI is None else grad_NI.view(ctx.shape), *(None for _ in range(5))


def _forward_apart(
    x_NI: Tensor, weight: Tensor, bias: Tensor | None, layer: str, segments: Segments
) -> tuple[Tensor, list[Tensor]]:
    out_NO, low, turned = x_NI.new_empty(len(x_NI), len(weight)), [], weight.t()
    sizes = [one.tokens.stop - one.tokens.start for one in segments]
    for segment, own, into in zip(segments, x_NI.split(sizes), out_NO.split(sizes), strict=True):
        if bias is None:
            torch.mm(own, turned, out=into)
        else:
            torch.addmm(bias, own, turned, out=into)
        if pair := segment.pair(layer, x_NI.dtype):
            low.append(add_adapter(into, own, pair, segment.adapter.scale))  # type: ignore[union-attr]
    return out_NO, low


def _backward_apart(
    grad_NO: Tensor,
    x_NI: Tensor,
    weight: Tensor,
    low: Sequence[Tensor],
    layer: str,
    segments: Segments,
    wanted: bool,
) -> Tensor | None:
    grad_NI, lows = torch.empty_like(x_NI) if wanted else None, iter(low)
    sizes = [one.tokens.stop - one.tokens.start for one in segments]
    intos = [None] * len(segments) if grad_NI is None else grad_NI.split(sizes)
    for segment, grad, own, into in zip(
        segments, grad_NO.split(sizes), x_NI.split(sizes), intos, strict=True
    ):
        if into is not None:
            torch.mm(grad, weight, out=into)
        if pair := segment.pair(layer, x_NI.dtype):
            assert segment.adapter is not None and segment.gradient is not None
            of_a, of_b = segment.gradient.pair(layer, own.dtype)
            scale = segment.adapter.scale
            back = add_gradient(into, grad, pair, scale)
            of_a.addmm_(back.t(), own, alpha=scale)
            of_b.addmm_(grad.t(), next(lows), alpha=scale)
    return grad_NI


def _beside(
    layer: str, segments: Segments, num_tokens: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """All A of the adapted segments [R, in], all B [out, R], and the scale of each token's own columns, zeros
    at those of others, [N, R]. None without any."""
    pairs = [pair for one in segments if (pair := one.pair(layer, like.dtype)) is not None]
    if not pairs:
        return None
    own_NR = segments.own(layer, num_tokens, like)
    if len(pairs) == 1:
        return *pairs[0], own_NR
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1), own_NR


def _forward_packed(
    x_NI: Tensor, weight: Tensor, bias: Tensor | None, layer: str, segments: Segments
) -> tuple[Tensor, list[Tensor]]:
    out_NO = linear(x_NI, weight, bias)
    beside = _beside(layer, segments, len(x_NI), x_NI)
    if beside is None:
        return out_NO, []
    a_RI, b_OR, own_NR = beside
    low_NR = linear(x_NI, a_RI).mul_(own_NR)
    return out_NO.addmm_(low_NR, b_OR.t()), [low_NR, a_RI, b_OR, own_NR]


def _backward_packed(
    grad_NO: Tensor,
    x_NI: Tensor,
    weight: Tensor,
    low: Sequence[Tensor],
    layer: str,
    segments: Segments,
    wanted: bool,
) -> Tensor | None:
    grad_NI = torch.mm(grad_NO, weight) if wanted else None
    if not low:
        return grad_NI
    low_NR, a_RI, b_OR, own_NR = low
    back_NR = torch.mm(grad_NO, b_OR).mul_(own_NR)
    if grad_NI is not None:
        grad_NI.addmm_(back_NR, a_RI)
    of_a, of_b = torch.mm(back_NR.t(), x_NI), torch.mm(grad_NO.t(), low_NR)
    adapted = [one for one in segments if one.pair(layer, x_NI.dtype) is not None]
    ranks = [one.adapter.rank for one in adapted if one.adapter is not None]
    into = [one.gradient.pair(layer, x_NI.dtype) for one in adapted if one.gradient]
    for part, found in enumerate((of_a.split(ranks), of_b.split(ranks, 1))):  # a call for all of them
        torch._foreach_add_([pair[part] for pair in into], list(found))
    return grad_NI
