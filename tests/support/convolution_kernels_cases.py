"""The convolution of packed rows by Triton's kernels, interpreted on a CPU, against that of plain torch."""

from functools import partial
from types import SimpleNamespace

import torch
from state_rows import ROWS, rows_of

from siirl.engines.train.attention import convolution_kernels
from siirl.engines.train.attention.state_layers import traced_convolution
from siirl.engines.train.packed.packing import pack_rows
from siirl.engines.train.packed.sequence_bounds import bounds_of, taps_of


def main() -> None:
    device = torch.device("cpu")
    random = [int(n) for n in torch.randint(1, 40, (13,), generator=torch.Generator().manual_seed(3))]
    packed = [pack_rows(rows_of(*ROWS[name]), device, share_prompts=True).bounds for name in ROWS]
    for bounds in (*packed, bounds_of(torch.tensor([1, 1, 2, 3, 150]))):
        held(bounds, 4, 6, False, "silu")
    bounds = bounds_of(torch.tensor(random))
    for width, channels in ((4, 150), (2, 6), (3, 7)):
        held(bounds, width, channels, True, "silu")
        held(bounds, width, channels, True, None)
    held(bounds, 1, 7, True, "silu")
    in_a_graph(bounds)


def held(bounds, width: int, channels: int, biased: bool, activation: str | None) -> None:
    """Inputs are some channels of a wider projection."""
    bounds.taps = taps_of(bounds, width)
    new = partial(torch.randn, generator=torch.Generator().manual_seed(width), dtype=torch.float32)
    wider = new(1, len(bounds.padded_index), channels + 5)
    given = [wider[..., 3:-2].transpose(1, 2), new(channels, width), new(channels)]
    told, kernels = new(given[0].shape), SimpleNamespace(**vars(convolution_kernels))
    found = []
    for by in (kernels, None):
        given = [x.detach().requires_grad_() for x in given]
        x, weight, bias = given
        y = traced_convolution(x, weight, bias if biased else None, activation, bounds=bounds, kernels=by)
        wanted = given if biased else given[:2]
        found.append([y, *torch.autograd.grad((y * told).sum(), wanted)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-5)


def in_a_graph(bounds) -> None:
    """As of a compiled layer: lengths, and what else is not a parameter's, are not known."""
    bounds.taps = taps_of(bounds, 4)
    layer = torch.nn.Conv1d(6, 6, 4, groups=6, bias=False)
    kernels, told = SimpleNamespace(**vars(convolution_kernels)), torch.randn(1, 6, len(bounds.padded_index))

    def by(kernels, hidden_NC):
        weight = layer.weight.squeeze(1)
        x = hidden_NC.transpose(1, 2)
        return traced_convolution(x, weight, None, "silu", bounds=bounds, kernels=kernels)

    hidden = torch.randn(1, len(bounds.padded_index), 6, requires_grad=True)
    compiled = torch.compile(by, dynamic=True, fullgraph=True, backend="aot_eager")
    found = []
    for y in (compiled(kernels, hidden), by(None, hidden)):
        found.append([y, *torch.autograd.grad((y * told).sum(), (hidden, layer.weight))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-5)
