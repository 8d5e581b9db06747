"""Rows that share a prompt, by the variable-length kernels: attention and gradients as of each row alone."""

from dataclasses import replace

import pytest
import torch
from packed_attention_cases import alone, bounds_of, drawn_forest, forest_bounds, rows_alone
from torch import nn
from transformers import AttentionInterface

from siirl.engines.train.attention_kernels import attention_by
from siirl.engines.train.shared_attention import join_
from siirl.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["torch", "flash_attn_4"])
def attention(request):
    """Packed attention by each kernels that there are."""
    try:
        return AttentionInterface()[attention_by(request.param)]
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_shared_prompts_in_bf16_are_near_to_the_definition(attention, seed, heads):
    forest = drawn_forest(seed, 40)
    bounds = on_cuda(forest_bounds(*forest))
    draw = torch.Generator("cuda").manual_seed(seed)
    shapes = [(1, num, len(bounds.padded_index), 64) for num in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, generator=draw, device="cuda") for shape in shapes]
    inputs = [x.bfloat16().requires_grad_() for x in inputs]
    out, _ = attention(nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.125)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = rows_alone(*exact, *forest, 0.125)
    assert_near(out, inputs, expected, exact, draw)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [None, 17])
def test_rows_that_share_nothing_in_bf16_are_near_to_the_definition(attention, seed, window):
    draw = torch.Generator("cuda").manual_seed(seed)
    lengths = torch.randint(1, 300, (5,), generator=draw, device="cuda").tolist()
    bounds = bounds_of(lengths)
    bounds = replace(bounds, cu_seqlens=bounds.cu_seqlens.cuda(), padded_index=bounds.padded_index.cuda())
    shapes = [(1, num, sum(lengths), 128) for num in (8, 2, 2)]
    inputs = [
        torch.randn(shape, generator=draw, device="cuda").bfloat16().requires_grad_() for shape in shapes
    ]
    out, _ = attention(nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.1, sliding_window=window)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    rows = zip(*(x.split(lengths, dim=2) for x in exact), strict=True)
    assert_near(out, inputs, torch.cat([alone(*row, 0.1, window) for row in rows], 1), exact, draw)


def assert_near(out, inputs, expected, exact, draw):
    weights = torch.randn(out.shape, generator=draw, device="cuda").bfloat16()
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights.double()).sum(), exact)
    for mine, reference in zip((out, *ours), (expected, *theirs), strict=True):
        assert (mine - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 64), (37, 6, 80), (1000, 16, 128), (5, 3, 256)])
def test_two_parts_are_joined_as_one_softmax_over_both(dtype, tokens, heads, size):
    draw = torch.Generator().manual_seed(tokens)
    out, more = torch.randn(2, tokens, heads, size, generator=draw).to(dtype)
    lse, more_lse = torch.randn(2, heads, tokens, generator=draw) * 20
    joined = torch.logaddexp(lse.double(), more_lse.double())
    shares = [(part - joined).exp().t().unsqueeze(-1) for part in (lse.double(), more_lse.double())]
    expected = out.double() * shares[0] + more.double() * shares[1]
    around = torch.full((heads, tokens + 7), torch.nan).cuda()
    within = around[:, 4 : 4 + tokens]
    within.copy_(lse)
    ours = out.cuda()
    join_(ours, within, more.cuda(), more_lse.cuda())
    torch.testing.assert_close(ours.cpu().double(), expected.to(dtype).double(), atol=1e-6, rtol=2**-7)
    torch.testing.assert_close(within.cpu().double(), joined, atol=1e-5, rtol=1e-6)
    assert around[:, :4].isnan().all() and around[:, 4 + tokens :].isnan().all()


def on_cuda(bounds):
    shared = bounds.shared
    ends = {name: getattr(shared, name).cuda() for name in ("prompt_ends", "response_ends")}
    cu, index = bounds.cu_seqlens.cuda(), bounds.padded_index.cuda()
    return replace(bounds, cu_seqlens=cu, padded_index=index, shared=replace(shared, **ends))
