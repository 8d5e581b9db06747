"""Attention sinks over packed rows: against a softmax with a logit more, written out in float64."""

import pytest
import torch
from sink_cases import SIZE, by_hand, inputs
from torch import Tensor, nn

from siirl.engines.train.attention.packed_attention import _padded, packed_attention
from siirl.engines.train.attention.shared_attention import FlashKernels
from siirl.engines.train.packed.sequence_bounds import bounds_of
from siirl.errors import NotSupportedError


def packed(given: list[Tensor], lengths: tuple[int, ...], window: int | None, scale: float) -> Tensor:
    bounds = bounds_of(torch.tensor(lengths))
    found, _ = packed_attention(
        nn.Module(),
        *given[:3],
        None,
        sequence_bounds=bounds,
        scaling=scale,
        sliding_window=window,
        s_aux=given[3],
    )
    return found


def by_a_key(given: list[Tensor], lengths: tuple[int, ...], window: int | None, scale: float) -> Tensor:
    """As fp32 on a GPU, whose kernels do not say their normaliser."""
    q, k, v = (x[0].transpose(0, 1) for x in given[:3])
    return _padded(q, k, v, bounds_of(torch.tensor(lengths)), scale, window, given[3]).unsqueeze(0)


@pytest.mark.parametrize("window", [None, 1, 5, 600])
@pytest.mark.parametrize("lengths", [(7, 3, 12, 1), (6, 6), (1100, 5)])
@pytest.mark.parametrize("attend", [packed, by_a_key])
def test_sinks_take_their_share_of_every_softmax(attend, lengths, window):
    given, scale = inputs(lengths), 0.4
    found = attend(given, lengths, window, scale)
    expected = by_hand(given, lengths, window, scale)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    along = torch.randn(found.shape)
    ours = torch.autograd.grad((found * along).sum(), given)
    theirs = torch.autograd.grad((expected * along).sum(), given)
    for mine, yours in zip(ours, theirs, strict=True):
        assert (mine - yours).abs().max() <= 2e-6 * max(1, float(yours.abs().max()))


def test_sinks_are_computed_in_bf16_and_their_gradients_come_in_their_type():
    lengths = (9, 4)
    given = inputs(lengths, torch.bfloat16)
    found = packed(given, lengths, None, SIZE**-0.5)
    expected = by_hand(given, lengths, None, SIZE**-0.5)
    torch.testing.assert_close(found.double(), expected, atol=0.03, rtol=0.02)
    ours = torch.autograd.grad(found.float().square().sum(), given)
    theirs = torch.autograd.grad(expected.square().sum(), given)
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - yours).abs().max() < 0.02 * yours.abs().max() + 0.02


def test_kernels_that_were_not_compared_with_sinks_are_refused():
    given = inputs((3,))
    with pytest.raises(NotSupportedError, match=r"attention sinks or caps.*attention_kernels=torch"):
        packed_attention(
            nn.Module(),
            *given[:3],
            None,
            sequence_bounds=bounds_of(torch.tensor((3,))),
            s_aux=given[3],
            flash=FlashKernels(),
        )
