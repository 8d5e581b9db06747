"""The functions between a Megatron layer's products: values, every gradient, rounding, compiled and not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from siirl.engines.train.megatron import fused
from siirl.engines.train.megatron.fused import (
    ClampedUnit,
    GatedUnit,
    Heads,
    StreamNorm,
    TurnedHeads,
    WholeNorms,
)

GROUPS, SIZE, EPS = 2, 16, 1e-6
COMPILED = (
    *("_norm", "_sum_norm", "_norm_backward", "_heads", "_heads_backward", "_gated", "_gated_backward"),
    *("_clamped", "_clamped_backward", "_squares", "_whole_norm", "_along", "_whole_norm_backward"),
)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def tables(tokens, turned, dtype=torch.float64):
    angles = torch.rand(tokens, turned // 2, dtype=torch.float64).repeat(1, 2) * 6
    return (1.1 * angles.cos()).to(dtype), (1.1 * angles.sin()).to(dtype)  # scaled, as YaRN does


def plain_norm(x, weight, from_one=False):
    return F.rms_norm(x, weight.shape, 1.0 + weight if from_one else weight, EPS)


def plain_rotation(x, cos, sin, neighbours):
    """As complex numbers, one for two features; of heads [N, ..., D]."""
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    pairs = (size // 2, 2) if neighbours else (2, size // 2)
    first, second = turned.unflatten(-1, pairs).unbind(-1 if neighbours else -2)
    at = (slice(None), *[None] * (x.dim() - 2), slice(size // 2))
    out = torch.complex(first, second) * torch.complex(cos[at], sin[at])
    out = torch.stack([out.real, out.imag], -1 if neighbours else -2).flatten(-2)
    return torch.cat([out, kept], -1)


def plain_heads(mixed, cos, sin, query, key, how):
    every = mixed.view(len(mixed), how.groups, -1, how.size)
    parts = [every[:, :, :-2].flatten(1, 2), every[:, :, -2], every[:, :, -1]]
    for at, weight in enumerate((query, key)):
        if weight is not None:
            parts[at] = plain_norm(parts[at], weight, how.from_one)
        parts[at] = plain_rotation(parts[at], cos, sin, how.neighbours)
    return tuple(parts)


def plain_stream(x, stream, weight, from_one):
    total = x if stream is None else x + stream
    return total, plain_norm(total, weight, from_one)


def cases(tokens):
    """Name -> (our function, the plain one, arguments, what else it takes)."""
    found = {}
    for from_one in (False, True):
        weight = draw(32)
        name = ", weights from one" if from_one else ""
        found[f"norm{name}"] = (
            lambda x, w, one: StreamNorm.apply(x, None, w, EPS, one),
            lambda x, w, one: plain_stream(x, None, w, one),
            (draw(tokens, 1, 32), weight),
            (from_one,),
        )
        found[f"sum and norm{name}"] = (
            lambda x, s, w, one: StreamNorm.apply(x, s, w, EPS, one),
            plain_stream,
            (draw(tokens, 1, 32), draw(tokens, 1, 32), weight),
            (from_one,),
        )
    kinds = {
        "heads": (4, SIZE, False, False, True),
        "neighbours, some features, one query of a group": (3, 8, True, False, True),
        "no norms, some features": (5, 8, False, False, False),
        "norms from one": (4, SIZE, False, True, True),
    }
    for name, (width, turned, neighbours, from_one, normed) in kinds.items():
        how = Heads(GROUPS, SIZE, neighbours, EPS, from_one)
        weights = (draw(SIZE), draw(SIZE)) if normed else (None, None)
        found[name] = (
            lambda mixed, q, k, cos, sin, how: TurnedHeads.apply(mixed, cos, sin, q, k, how),
            lambda mixed, q, k, cos, sin, how: plain_heads(mixed, cos, sin, q, k, how),
            (draw(tokens, 1, GROUPS * width * SIZE), *weights),
            (*tables(tokens, turned), how),
        )
    found["gated unit"] = (
        lambda both: (GatedUnit.apply(both),),
        lambda both: (F.silu(both[..., :24]) * both[..., 24:],),
        (draw(tokens, 1, 48),),
        (),
    )
    found["clamped unit"] = (
        lambda both, *how: (ClampedUnit.apply(both, *how),),
        plain_clamped,
        (draw(tokens, 48),),
        (1.7, 0.6),
    )
    found["whole norms"] = (
        WholeNorms.apply,
        lambda q, k, query, key, *_: tuple(
            plain_norm(x.flatten(1), weight).view(x.shape) for x, weight in ((q, query), (k, key))
        ),
        (draw(tokens, 4, 16), draw(tokens, 2, 16), draw(64), draw(32)),
        (EPS, FakeProcessGroup()),
    )
    return found


class FakeProcessGroup:
    """Of one rank."""

    def size(self) -> int:
        return 1


def plain_clamped(both, alpha, limit):
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate),)


def with_gradients(function, arguments, extra, dtype):
    """Outputs, then the gradient of each argument, for fixed draws."""
    given = [x if x is None else x.detach().to(dtype).requires_grad_() for x in arguments]
    extra = [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in extra]
    outputs = function(*given, *extra)
    draws = torch.Generator().manual_seed(7)
    grads = [torch.randn(x.shape, generator=draws, dtype=torch.float64).to(dtype) for x in outputs]
    torch.autograd.backward(outputs, grads)
    return [*(x.detach() for x in outputs), *(x.grad for x in given if x is not None)]


def assert_as_plain(tokens):
    for name, (ours, plain, arguments, extra) in cases(tokens).items():
        wanted = with_gradients(plain, arguments, extra, torch.float64)
        found = with_gradients(ours, arguments, extra, torch.float32)
        for at, (got, want) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, msg=f"{name}, number {at}")


def test_values_and_gradients_are_those_of_the_plain_functions():
    torch.manual_seed(0)
    assert_as_plain(11)


@pytest.mark.parametrize("name", ["norm", "sum and norm", "heads"])
def test_a_frozen_weight_gets_no_gradient_and_its_input_the_same(name):
    torch.manual_seed(0)
    ours, _, (x, *others, weight), extra = cases(5)[name]
    both = []
    for frozen in (False, True):
        given = [x.detach().float().requires_grad_(), *(y.detach().float() for y in (*others, weight))]
        given[-1].requires_grad_(not frozen)
        if name == "heads":  # the norm of queries, too: both are trained or none
            given[1].requires_grad_(not frozen)
        outputs = ours(*given, *(y.float() if isinstance(y, torch.Tensor) else y for y in extra))
        sum((y * y.detach()).sum() for y in outputs).backward()
        assert (given[-1].grad is None) == frozen
        both.append(given[0].grad)
    assert torch.equal(*both)


def test_values_lie_in_the_product_and_are_not_copied():
    mixed = draw(6, 1, GROUPS * 4 * SIZE, dtype=torch.float32)
    cos, sin = tables(6, SIZE, torch.float32)
    _, _, value = TurnedHeads.apply(mixed, cos, sin, None, None, Heads(GROUPS, SIZE, False, EPS, False))
    assert value.untyped_storage().data_ptr() == mixed.untyped_storage().data_ptr()


def test_a_norm_without_gradient_of_its_output_passes_the_streams_on():
    x, weight = draw(3, 1, 8, dtype=torch.float32), nn.Parameter(torch.ones(8))
    stream, _ = StreamNorm.apply(x, None, weight, EPS, False)
    stream.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and weight.grad is None


def separately(name):
    """What the layers computed with before, each operation rounded: torch's norm, rotation, MLP's SwiGLU."""

    def turned(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)

    def heads(mixed, q, k, cos, sin, how):
        every = mixed.view(len(mixed), how.groups, -1, how.size)
        query, key = every[:, :, :-2].flatten(1, 2), every[:, :, -2]
        return (
            turned(plain_norm(query, q), cos, sin),
            turned(plain_norm(key, k), cos, sin),
            every[:, :, -1],
        )

    return {"heads": heads}.get(name) or cases(4)[name][1]


ROUNDED = ("norm", "sum and norm", "heads", "gated unit", "clamped unit", "whole norms")


def rounding_errors(name):
    """Root mean squares of what bf16 loses of each output and gradient: by our function, and separately."""
    ours, plain, arguments, extra = cases(512)[name]
    arguments = [x.detach().bfloat16().double() for x in arguments]
    extra = [x.bfloat16().double() if isinstance(x, torch.Tensor) else x for x in extra]
    want = with_gradients(plain, arguments, extra, torch.float64)
    for function in (ours, separately(name)):
        got = with_gradients(function, arguments, extra, torch.bfloat16)
        yield [(a.double() - b).square().mean().sqrt().item() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_in_bf16_is_no_worse_than_that_of_separate_operations(name):
    torch.manual_seed(0)
    for new, old in zip(*rounding_errors(name), strict=True):
        assert new <= 1.02 * old


@pytest.mark.slow
def test_compiled_functions_compute_the_same_for_any_number_of_tokens(monkeypatch):
    for name in COMPILED:
        monkeypatch.setattr(fused, name, getattr(fused, name).by_compiler)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    first = counts["unique_graphs"]
    assert_as_plain(11)
    compiled = counts["unique_graphs"]
    for tokens in (7, 32, 45):
        assert_as_plain(tokens)
    assert compiled > first and counts["unique_graphs"] == compiled
    for name in ROUNDED:
        for new, old in zip(*rounding_errors(name), strict=True):
            assert new <= 1.02 * old
