"""Linear layers of a frozen model that many adapters use in one pass, each on tokens of its own.

A pass has the tokens of several segments, one behind the other; a segment has an adapter, or none. In layers
that compute **apart**, as on a CPU, each segment is multiplied by itself, so that what comes of it, to the
last bit, is what comes of it alone: how a product rounds depends on its number of rows. Elsewhere the base
multiplies all tokens at once, and so do the adapters of all segments, side by side in one matrix of their
ranks together, of which a token keeps the columns of its own (Chen et al., "Punica" (2023), has kernels for
the same sum). That is a layer with one adapter, compiled or not: its matrices are given to it for the pass.
Whatever adapters there are, all layers have as many ranks, LEAST at least, so that a compiled layer has one
graph for all passes.

Legend: N tokens of a pass, r rank of an adapter, R ranks of all adapters of a pass.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl.engines.train.adapters.adapter_products import Beside, add_adapter, add_gradient, compute_beside
from siirl.engines.train.adapters.lora import linear_layers
from siirl.engines.train.layer_compiler import compute_by

Shapes = dict[str, tuple[int, int]]
"""Layer -> (out, in) of its weight."""
Pairs = dict[str, tuple[Tensor, Tensor]]
"""Layer -> A and B, or their gradients."""
LEAST = 2
"""Ranks of a pass. torch's compiler takes a size of 0 or 1 for a constant."""


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
        self.layers = list(shapes)
        self.vector = torch.zeros(sum(map(math.prod, self._shapes.values())), device=device)
        self._cast: dict[torch.dtype, tuple[Tensor, Pairs]] = {}
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
        """In the type that a pass computes in; leaves of its graph."""
        if dtype not in self._cast:
            vector = self.vector.to(dtype)
            pairs = {name: (leaf(a), leaf(b)) for name, (a, b) in self.pairs(vector).items()}
            self._cast[dtype] = vector, pairs
        return self._cast[dtype][1]

    def gradient(self) -> "Gradient":
        """Zeros for the gradient of a request, until the next one."""
        if self._gradient is None:
            self._gradient = Gradient(self)
        self._gradient.clear()
        return self._gradient

    def changed(self) -> None:
        """The vector has other numbers."""
        for vector, _ in self._cast.values():
            if vector is not self.vector:
                vector.copy_(self.vector)

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


def leaf(matrix: Tensor) -> Tensor:
    """The same numbers, as what a gradient is wanted of."""
    return matrix.detach().requires_grad_()


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

    def end_pass(self, parts: Sequence[Tensor]) -> None:
        """Add what a pass has made: what was added to pairs, or matrices in the order of the adapter's."""
        if parts:
            self.sum.add_(torch.cat(parts))
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


class _Own(NamedTuple):
    """What a layer multiplies the tokens of a segment by, apart from others."""

    pair: tuple[Tensor, Tensor]
    scale: float
    gradient: tuple[Tensor, Tensor] | None
    """Where those of the pair are added to."""


class AdaptedLayers:
    """The linear layers of a model, but its head, with whatever adapters a pass has."""

    def __init__(
        self, hf: PreTrainedModel, targets: str | Sequence[str], dtype: torch.dtype, apart: bool
    ) -> None:
        """Take the place of what the layers do. targets: as model.target_modules. dtype: that is computed in.
        apart: whether segments are; not in layers that are compiled."""
        self.shapes: Shapes = {}
        self._dtype, self._apart = dtype, apart
        self._sizes: list[int] = []
        """Tokens of each segment of the pass that runs."""
        self._own: dict[str, list[_Own | None]] = {}
        """Of each layer, for each segment, where these are apart."""
        self._anchor = torch.zeros(1, requires_grad=True)
        self._layers: dict[str, Any] = {}
        for name in linear_layers(hf, targets):
            layer = hf.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            self._layers[name], self.shapes[name] = layer, (layer.out_features, layer.in_features)
            if apart:
                layer.forward = partial(self._forward, name, layer)
            else:
                compute_by(layer, compute_beside)

    @contextmanager
    def passing(self, segments: Sequence[Segment], device: torch.device) -> Iterator[None]:
        """Around a pass over segments, forward and backward: then their gradients have what comes of it."""
        self._sizes = [one.tokens.stop - one.tokens.start for one in segments]
        beside = {} if self._apart else self._beside(segments, device)
        self._own = {name: self._of_layer(name, segments) for name in self.shapes} if self._apart else {}
        for name, found in beside.items():
            self._layers[name].beside = found
        try:
            yield
            for one, columns in zip(segments, _columns(segments), strict=True):
                if one.gradient is not None and one.adapter is not None:
                    one.gradient.end_pass(_parts(one.adapter, beside, columns) if beside else [])
        finally:
            self._own = {}
            for name, (a, b, _) in beside.items():
                a.grad = b.grad = None
                del self._layers[name].beside

    def _forward(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        return _Apart.apply(x, self._anchor, layer.weight, layer.bias, self._own[name], self._sizes)

    def _of_layer(self, name: str, segments: Sequence[Segment]) -> list[_Own | None]:
        """What it multiplies each by."""
        found: list[_Own | None] = []
        for one in segments:
            pair = None if one.adapter is None else one.adapter.weights(self._dtype).get(name)
            gradient = one.gradient.pair(name, self._dtype) if pair and one.gradient else None
            found.append(pair and _Own(pair, one.adapter.scale, gradient))  # type: ignore[union-attr]
        return found

    @torch.no_grad()
    def _beside(self, segments: Sequence[Segment], device: torch.device) -> dict[str, Beside]:
        """What each layer computes with in a pass: parts of one vector, as an adapter's are. To torch's
        compiler a matrix of its own, at the beginning of its memory, is another kind."""
        columns, num_tokens = _columns(segments), segments[-1].tokens.stop
        num_ranks = max(LEAST, columns[-1].stop)
        scale_NR = torch.zeros(num_tokens, num_ranks, dtype=self._dtype, device=device)
        adapters = [one.adapter for one in segments if one.adapter is not None]
        for one, own in zip(segments, columns, strict=True):
            if one.adapter is not None:
                scale_NR[one.tokens, own] = one.adapter.scale
        if len(adapters) == 1 and num_ranks == adapters[0].rank and adapters[0].layers == list(self.shapes):
            return {name: (*pair, scale_NR) for name, pair in adapters[0].weights(self._dtype).items()}
        sizes = [size for wide, deep in self.shapes.values() for size in (num_ranks * deep, wide * num_ranks)]
        flat = torch.empty(sum(sizes), dtype=self._dtype, device=device).split(sizes)
        found, none = {}, torch.zeros((), dtype=self._dtype, device=device)
        for (name, (wide, deep)), of_a, of_b in zip(self.shapes.items(), flat[::2], flat[1::2], strict=True):
            pairs = [
                one.weights(self._dtype).get(name)
                or (none.expand(one.rank, deep), none.expand(wide, one.rank))
                for one in adapters
            ]
            if lacking := num_ranks - columns[-1].stop:
                pairs.append((none.expand(lacking, deep), none.expand(wide, lacking)))
            a = torch.cat([a for a, _ in pairs], out=of_a.view(num_ranks, deep))
            b = torch.cat([b for _, b in pairs], 1, out=of_b.view(wide, num_ranks))
            found[name] = leaf(a), leaf(b), scale_NR
        return found


def _columns(segments: Sequence[Segment]) -> list[slice]:
    """Of each among the ranks of all."""
    ranks = [0 if one.adapter is None else one.adapter.rank for one in segments]
    return [slice(*ends) for ends in pairwise(accumulate(ranks, initial=0))]


def _parts(adapter: Adapter, beside: Mapping[str, Beside], columns: slice) -> list[Tensor]:
    """The gradient of an adapter, matrix by matrix; zeros of layers that had no part in the pass."""
    found = []
    for name in adapter.layers:
        a, b, _ = beside[name]
        of_a, of_b = (torch.zeros_like(one) if one.grad is None else one.grad for one in (a, b))
        found += [of_a[columns].reshape(-1), of_b[:, columns].reshape(-1)]
    return found


class _Apart(torch.autograd.Function):
    """(x [..., N, in], a tensor with gradient, W, bias, what each segment is multiplied by, tokens of each)
    -> [..., N, out], each segment by itself. Gradients of adapters are added to those of the segments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        owns: Sequence[_Own | None],
        sizes: list[int],
    ) -> Tensor:
        x_NI, turned = x.reshape(-1, x.shape[-1]), weight.t()
        out_NO, low = x_NI.new_empty(len(x_NI), len(weight)), []
        parts = zip(owns, x_NI.split_with_sizes(sizes), out_NO.split_with_sizes(sizes), strict=True)
        for own, part, into in parts:
            if bias is None:
                torch.mm(part, turned, out=into)
            else:
                torch.addmm(bias, part, turned, out=into)
            if own is not None:
                low.append(add_adapter(into, part, own.pair, own.scale))
        ctx.save_for_backward(x_NI, weight, *low)
        ctx.owns, ctx.sizes, ctx.shape = owns, sizes, x.shape
        return out_NO.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, *low = ctx.saved_tensors
        grad_NO, lows, sizes = grads[0].reshape(-1, len(weight)), iter(low), ctx.sizes
        grad_NI = torch.empty_like(x_NI) if ctx.needs_input_grad[0] else None
        intos = [None] * len(sizes) if grad_NI is None else grad_NI.split_with_sizes(sizes)
        parts = zip(
            ctx.owns, grad_NO.split_with_sizes(sizes), x_NI.split_with_sizes(sizes), intos, strict=True
        )
        for own, grad, part, into in parts:
            if into is not None:
                torch.mm(grad, weight, out=into)
            if own is not None:
                assert own.gradient is not None
                of_a, of_b = own.gradient
                back = add_gradient(into, grad, own.pair, own.scale)
                of_a.addmm_(back.t(), part, alpha=own.scale)
                of_b.addmm_(grad.t(), next(lows), alpha=own.scale)
        return None if grad_NI is None else grad_NI.view(ctx.shape), *(None for _ in range(5))
