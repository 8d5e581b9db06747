"""The convolution in the graph of compiled layers gives what the one in parts gives, and its gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from dist_harness import run_interpreted
from state_rows import ROWS, rows_of

from siirl.engines.train.attention.state_layers import convolution, packed_convolution, traced_convolution
from siirl.engines.train.packed.packing import pack_rows
from siirl.engines.train.packed.sequence_bounds import taps_of

CHANNELS = 6


def causal(x_SCL, weight_CW, bias, activation):
    padded = F.pad(x_SCL, (weight_CW.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight_CW.unsqueeze(1), bias, groups=CHANNELS))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("rows", ["short rows", "shared prompts"])
@pytest.mark.parametrize("width", [2, 4])
def test_taps_of_packed_rows_are_those_of_each_part(rows, share, width):
    bounds = pack_rows(rows_of(*ROWS[rows]), torch.device("cpu"), share_prompts=share).bounds
    bounds.taps = taps_of(bounds, width)
    assert (bounds.taps.begin_M is not None) == share
    draw = torch.Generator().manual_seed(1)
    new = partial(torch.randn, generator=draw, dtype=torch.float64, requires_grad=True)
    given = new(1, CHANNELS, len(bounds.padded_index)), new(CHANNELS, width), new(CHANNELS)
    ways = (
        traced_convolution(*given, "silu", bounds=bounds),
        packed_convolution(*given, "silu", bounds=bounds, by=partial(convolution, causal)),
    )
    told = torch.randn(ways[0].shape, generator=draw, dtype=torch.float64)
    grads = [torch.autograd.grad((way * told).sum(), given) for way in ways]
    for ours, theirs in zip((ways[0], *grads[0]), (ways[1], *grads[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_kernels_of_the_convolution_equal_plain_torch():
    pytest.importorskip("triton")
    run_interpreted("convolution_kernels_cases")
