"""Rows that share prompts, by one call of a kernel: what it reads, and attention as of each row alone."""

import itertools

import flash_stand_ins
import pytest
import torch
from dist_harness import run_interpreted
from packed_attention_cases import bounds_of, drawn_forest, each_row, forest_bounds, rows_alone, sample
from torch.utils.checkpoint import checkpoint

from siirl.engines.train.attention import shared_attention
from siirl.engines.train.attention.shared_attention import FlashKernels, added_up, gathered
from siirl.engines.train.packed import sequence_bounds
from siirl.engines.train.packed.sequence_bounds import with_segment

ONES = ([1, 1], [[1, 1], [1]], [1])
NOTHING_AFTER = ([3, 2], [[0], [4]], [])
SEEDS = range(24)


@pytest.fixture
def kernels(monkeypatch):
    """Those of torch, by their definition."""
    monkeypatch.setattr(shared_attention, "aten", flash_stand_ins.torch_kernels)
    return FlashKernels()


@pytest.fixture
def without_bound(monkeypatch):
    monkeypatch.setattr(sequence_bounds, "MOST_GATHERED", 100.0)


@pytest.mark.usefixtures("without_bound")
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("forest", [ONES, NOTHING_AFTER, *map(drawn_forest, SEEDS)], ids=str)
def test_each_segment_reads_its_row_up_to_its_end(forest, extra):
    bounds = forest_bounds(*forest)
    rows = each_row(*forest)
    if extra:
        rows.append((list(range(len(bounds.padded_index), len(bounds.padded_index) + extra)),) * 2)
        bounds = with_segment(bounds, extra)
    keys = bounds.keys
    by_segment = {own[0]: tokens for tokens, own in rows}
    expected = [by_segment[first] for first in bounds.cu_seqlens.tolist()[:-1]]
    assert keys.index.tolist() == list(itertools.chain(*expected))
    assert keys.ends.tolist() == [0, *itertools.accumulate(map(len, expected))]
    assert keys.ends.dtype == torch.int32
    assert keys.longest == max(map(len, expected)) and keys.num_tokens == len(bounds.padded_index)
    first, place = keys.places
    stands = [place[a:b].tolist() for a, b in itertools.pairwise(first.tolist())]
    everywhere = keys.index.tolist()
    assert stands == [[m for m, token in enumerate(everywhere) if token == n] for n in range(len(stands))]
    assert len(stands) == keys.num_tokens


def packed(inputs):
    return [x[0].transpose(0, 1).contiguous().detach().requires_grad_() for x in inputs]


@pytest.mark.parametrize("most", [0.0, 100.0], ids=["two calls", "one call"])
@pytest.mark.parametrize("forest", [ONES, NOTHING_AFTER, *map(drawn_forest, SEEDS)], ids=str)
def test_attention_and_gradients_are_those_of_each_row_alone(kernels, forest, most, monkeypatch):
    monkeypatch.setattr(sequence_bounds, "MOST_GATHERED", most)
    bounds = forest_bounds(*forest)
    exact = [x.requires_grad_() for x in sample(len(bounds.padded_index), 3)]
    inputs = packed(exact)
    out, expected = kernels.shared(*inputs, bounds, 0.3), rows_alone(*exact, *forest, 0.3)
    torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-10)
    along = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((out * along[0]).sum(), inputs)
    theirs = torch.autograd.grad((expected * along).sum(), exact)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference[0].transpose(0, 1), rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("without_bound")
def test_what_rows_read_is_made_again_for_a_backward_pass_and_not_kept(kernels):
    """Under recomputation, too."""
    bounds = forest_bounds([5], [[4, 4, 4, 4]], [])
    assert len(bounds.keys.index) > len(bounds.padded_index)
    found = []
    for recomputes in (False, True):
        inputs, kept = packed(sample(len(bounds.padded_index))), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(len(x)) or x, lambda x: x):  # noqa: B023
            arguments = (*inputs, bounds, 0.3)
            if recomputes:
                out = checkpoint(kernels.shared, *arguments, use_reentrant=False)
            else:
                out = kernels.shared(*arguments)
            found.append(torch.autograd.grad(out.square().sum(), inputs))
        assert kept and len(bounds.keys.index) not in kept
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("responses", "calls"), [([3, 1], 1), ([2, 1], 2)])
def test_prompts_that_are_long_beside_their_responses_are_read_by_a_call_of_their_own(
    kernels, responses, calls, monkeypatch
):
    """Two responses read 4 keys of their prompt again: as many as there are tokens, or one more."""
    bounds = forest_bounds([4], [responses], [])
    seen = []

    def forward(*arguments, **options):
        seen.append(arguments[8])
        return flash_stand_ins.torch_kernels._flash_attention_forward(*arguments, **options)

    spied = {**vars(flash_stand_ins.torch_kernels), "_flash_attention_forward": forward}
    monkeypatch.setattr(shared_attention, "aten", type(flash_stand_ins.torch_kernels)(**spied))
    kernels.shared(*packed(sample(len(bounds.padded_index))), bounds, 0.3)
    assert seen == [True, False][:calls]


@pytest.mark.usefixtures("without_bound")
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float32, 1e-5)])
def test_gradients_are_rounded_once_and_lie_as_keys_and_values_do(dtype, rounding):
    bounds = forest_bounds([9], [[2] * 40], [5])
    draw, index = torch.Generator().manual_seed(0), bounds.keys.index
    product = torch.randn(len(bounds.padded_index), 6, 8, generator=draw).to(dtype)
    by_head = torch.randn(3, len(bounds.padded_index), 8, generator=draw).to(dtype)
    k, v = by_head.transpose(0, 1), product[:, 2:5]
    for mine, x in zip(gathered(k, v, bounds.keys), (k, v), strict=True):
        assert torch.equal(mine, x[index]) and mine.is_contiguous()
    grads = torch.randn(2, len(index), 3, 8, generator=draw).to(dtype)
    for mine, grad, x in zip(added_up(*grads, k, v, bounds.keys), grads, (k, v), strict=True):
        expected = torch.zeros(x.shape, dtype=torch.float64).index_add_(0, index, grad.double())
        torch.testing.assert_close(mine.double(), expected, rtol=rounding, atol=1e-5)
        assert mine.stride() == torch.empty_like(x).stride()


def test_rows_that_share_nothing_read_what_they_are_given():
    bounds = bounds_of([3, 4])
    k, v = torch.randn(2, 7, 2, 8)
    assert bounds.keys is None and gathered(k, v, None) == (k, v) and added_up(k, v, k, v, None) == (k, v)


def test_the_kernels_gather_join_and_add_up_as_torch_does():
    pytest.importorskip("triton")
    run_interpreted("gathered_keys_kernels")
