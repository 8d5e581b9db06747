"""Rows that share a prompt, by the variable-length kernels: attention and gradients as of each row alone."""

from dataclasses import replace

import pytest
import torch
from packed_attention_cases import drawn_forest, forest_bounds, rows_alone
from torch import nn

from siirl.engines.train.attention import packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_shared_prompts_in_bf16_are_near_to_the_definition(seed, heads):
    forest = drawn_forest(seed, 40)
    bounds = on_cuda(forest_bounds(*forest))
    draw = torch.Generator("cuda").manual_seed(seed)
    shapes = [(1, num, len(bounds.padded_index), 64) for num in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, generator=draw, device="cuda") for shape in shapes]
    inputs = [x.bfloat16().requires_grad_() for x in inputs]
    out, _ = packed_attention(nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.125)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = rows_alone(*exact, *forest, 0.125)
    weights = torch.randn(out.shape, generator=draw, device="cuda").bfloat16()
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights.double()).sum(), exact)
    for mine, reference in zip((out, *ours), (expected, *theirs), strict=True):
        assert (mine - reference).norm() < 0.01 * reference.norm()


def on_cuda(bounds):
    shared = bounds.shared
    ends = {name: getattr(shared, name).cuda() for name in ("prompt_ends", "response_ends")}
    cu, index = bounds.cu_seqlens.cuda(), bounds.padded_index.cuda()
    return replace(bounds, cu_seqlens=cu, padded_index=index, shared=replace(shared, **ends))
