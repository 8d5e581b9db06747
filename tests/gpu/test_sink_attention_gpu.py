"""Attention sinks by the variable-length kernels, and by a key in fp32: against their definition."""

from dataclasses import replace

import pytest
import torch
from sink_cases import SIZE, by_hand, inputs
from torch import nn

from siirl.engines.train.attention.packed_attention import packed_attention
from siirl.engines.train.packed.sequence_bounds import bounds_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.012}
OF_SINKS = 3
"""Times that for gradients of sinks, which are sums of terms that cancel, while their rounding does not."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 17, 600])
@pytest.mark.parametrize("lengths", [(7, 3, 12, 1), (300, 1, 211, 64), (1500, 129)])
def test_sinks_on_a_gpu_take_their_share_of_every_softmax(lengths, window, dtype):
    given = inputs(lengths, dtype, "cuda")
    bounds = bounds_of(torch.tensor(lengths))
    bounds = replace(bounds, cu_seqlens=bounds.cu_seqlens.cuda(), padded_index=bounds.padded_index.cuda())
    out, _ = packed_attention(
        nn.Module(), *given[:3], None, sequence_bounds=bounds, sliding_window=window, s_aux=given[3]
    )
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = by_hand(exact, lengths, window, SIZE**-0.5)
    torch.manual_seed(0)
    along = torch.randn_like(out)
    ours = torch.autograd.grad((out * along).sum(), given)
    theirs = torch.autograd.grad((expected * along.double()).sum(), exact)
    times = (1, 1, 1, 1, OF_SINKS)
    for mine, wanted, near in zip((out, *ours), (expected, *theirs), times, strict=True):
        assert (mine - wanted).norm() < near * NEAR[dtype] * wanted.norm() + 1e-6
