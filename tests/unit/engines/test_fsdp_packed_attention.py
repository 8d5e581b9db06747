"""Packed attention equals attention of each sequence alone; nothing leaks from one sequence to another."""

import pytest
import torch
from torch import nn

from siirl.engines.train.attention import SequenceBounds, packed_attention
from siirl.errors import NotSupportedError

HEADS, KV_HEADS, SIZE = 4, 2, 8


def bounds_of(lengths: list[int]) -> SequenceBounds:
    longest = max(lengths)
    index = [row * longest + place for row, length in enumerate(lengths) for place in range(length)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return SequenceBounds(ends, torch.tensor(index), longest)


def sample(num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, h, num_tokens, SIZE, generator=draw, dtype=torch.float64) for h in heads]


def alone(query, key, value, scale, window):
    """Attention of one sequence by the definition, [1, L, H, D]."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    length = query.shape[2]
    ago = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (ago < 0) | (ago >= (window or length))
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", [[5, 1, 7, 3], [4, 4, 4], [6]], ids=["ragged", "equal", "single"])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_packed_attention_equals_attention_of_each_sequence_alone(lengths, window):
    inputs = [x.requires_grad_() for x in sample(sum(lengths))]
    out, _ = packed_attention(
        nn.Module(), *inputs, None, sequence_bounds=bounds_of(lengths), scaling=0.3, sliding_window=window
    )
    pieces = zip(*(x.split(lengths, dim=2) for x in inputs), strict=True)
    expected = torch.cat([alone(*piece, 0.3, window) for piece in pieces], dim=1)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-12, rtol=0)


def test_changing_one_sequence_leaves_the_others_bit_for_bit():
    lengths = [5, 1, 7, 3]
    before, _ = packed_attention(nn.Module(), *sample(16), None, sequence_bounds=bounds_of(lengths))
    changed = sample(16)
    for x in changed:
        x[:, :, 6:13] += 1.0
    after, _ = packed_attention(nn.Module(), *changed, None, sequence_bounds=bounds_of(lengths))
    same = (before == after).all(dim=-1).all(dim=-1)[0]
    assert same.tolist() == [True] * 6 + [False] * 7 + [True] * 3


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_attention_with_extras_is_refused(extra):
    with pytest.raises(NotSupportedError, match="not supported yet"):
        packed_attention(nn.Module(), *sample(4), None, sequence_bounds=bounds_of([4]), **extra)
