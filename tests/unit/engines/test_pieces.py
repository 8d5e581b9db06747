"""Consecutive elements of a tensor as rectangles of it, whatever dimensions it has."""

import math

import pytest
import torch

from siirl.engines.train.pieces import rectangles


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 2, 4), (3, 2, 2, 1, 3)])
def test_any_run_of_elements_is_put_back_where_it_was(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel()):
        for end in range(start + 1, whole.numel() + 1):
            found = torch.full(shape, -1)
            for local, offset in rectangles(whole.view(-1)[start:end], start, shape[1:], (0,) * len(shape)):
                place = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))
                assert (found[place] == -1).all(), "elements of two pieces"
                found[place] = local
            inside = (whole >= start) & (whole < end)
            assert torch.equal(found, torch.where(inside, whole, -1)), (start, end)


def test_a_block_of_a_matrix_lies_where_it_begins():
    pieces = list(rectangles(torch.arange(3, 11), 3, (4,), (10, 20)))
    assert [offset for _, offset in pieces] == [(10, 23), (11, 20), (12, 20)]
    assert [local.tolist() for local, _ in pieces] == [[[3]], [[4, 5, 6, 7]], [[8, 9, 10]]]
