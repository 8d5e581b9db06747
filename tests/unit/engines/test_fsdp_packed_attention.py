"""Packed attention equals attention of each sequence alone; nothing leaks from one sequence to another."""

import pytest
import torch
from packed_attention_cases import alone, bounds_of, drawn_forest, forest_bounds, rows_alone, sample
from torch import nn

from siirl.engines.train.attention.packed_attention import packed_attention


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


@pytest.mark.parametrize(
    ("said", "window"), [({}, 3), ({"sliding_window": None}, None), ({"sliding_window": 2}, 2)]
)
def test_a_window_is_the_module_s_only_where_the_model_says_nothing(said, window):
    module, inputs = nn.Module(), sample(7)
    module.sliding_window = 3
    out, _ = packed_attention(module, *inputs, None, sequence_bounds=bounds_of([7]), scaling=0.3, **said)
    torch.testing.assert_close(out, alone(*inputs, 0.3, window), atol=1e-12, rtol=0)


def test_changing_one_sequence_leaves_the_others_bit_for_bit():
    lengths = [5, 1, 7, 3]
    before, _ = packed_attention(nn.Module(), *sample(16), None, sequence_bounds=bounds_of(lengths))
    changed = sample(16)
    for x in changed:
        x[:, :, 6:13] += 1.0
    after, _ = packed_attention(nn.Module(), *changed, None, sequence_bounds=bounds_of(lengths))
    same = (before == after).all(dim=-1).all(dim=-1)[0]
    assert same.tolist() == [True] * 6 + [False] * 7 + [True] * 3


@pytest.mark.parametrize("window", [None, 3])
def test_capped_logits_are_those_of_each_row_alone_by_the_definition(window):
    lengths, cap, scale = [5, 1, 7, 3], 0.8, 0.3
    q, k, v = inputs = [x.requires_grad_() for x in sample(16)]
    out, _ = packed_attention(
        nn.Module(),
        *inputs,
        None,
        sequence_bounds=bounds_of(lengths),
        scaling=scale,
        sliding_window=window,
        softcap=cap,
    )
    rows = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    back = torch.arange(16)[:, None] - torch.arange(16)
    seen = (rows[:, None] == rows) & (back >= 0) & (back < (window or 16))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = cap * torch.tanh(q @ k.transpose(2, 3) * scale / cap)
    assert (logits - q @ k.transpose(2, 3) * scale).detach().abs().max() > 0.1
    expected = (logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_share_a_prompt_attend_as_each_alone(seed):
    forest = drawn_forest(seed)
    bounds = forest_bounds(*forest)
    inputs = [x.requires_grad_() for x in sample(len(bounds.padded_index), seed)]
    with_window = {"sliding_window": 100} if seed == 2 else {}
    out, _ = packed_attention(nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.3, **with_window)
    expected = rows_alone(*inputs, *forest, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-12, rtol=0)


def test_gradients_go_back_as_the_kernels_wrote_them_token_by_token():
    """Another order is a pass over memory for each of the three, in every layer."""
    bounds = forest_bounds(*drawn_forest(0))
    leaves = [x[0].transpose(0, 1).contiguous().requires_grad_() for x in sample(len(bounds.padded_index))]
    inputs, lie = [x.transpose(0, 1).unsqueeze(0) for x in leaves], []
    for x in inputs:
        x.register_hook(lambda grad: lie.append(grad.squeeze(0).transpose(0, 1).is_contiguous()))
    out, _ = packed_attention(nn.Module(), *inputs, None, sequence_bounds=bounds)
    out.sum().backward()
    assert lie == [True] * 3


def test_a_window_that_may_end_inside_a_shared_prompt_is_refused():
    bounds = forest_bounds([5], [[3, 2]], [])
    with pytest.raises(AssertionError, match="window"):
        packed_attention(nn.Module(), *sample(10), None, sequence_bounds=bounds, sliding_window=4)


def test_the_compiler_of_layers_has_no_reason_to_look_into_the_bounds_of_rows():
    """torch 2.11 compiles a layer again for other lengths of tuples in a frozen dataclass."""
    from torch._dynamo.utils import is_frozen_dataclass

    assert not is_frozen_dataclass(forest_bounds([3], [[2, 2]], [4]))
