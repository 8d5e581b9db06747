"""Storages can be emptied and refilled behind every view of them."""

import torch

from siirl.engines.train.transfers import HostCopies


def test_views_and_tied_tensors_see_the_same_values_after_restore():
    weight = torch.randn(6, 4)
    expected, view, tied = weight.clone(), weight[2:4], weight.t()
    other = torch.arange(3)
    copies = HostCopies()
    copies.take([weight, view, tied, other])
    assert copies
    assert weight.untyped_storage().nbytes() == 0
    assert other.untyped_storage().nbytes() == 0
    copies.restore()
    assert not copies
    assert torch.equal(weight, expected)
    assert torch.equal(view, expected[2:4])
    assert torch.equal(tied, expected.t())
    assert torch.equal(other, torch.arange(3))


def test_restoring_nothing_does_nothing():
    HostCopies().restore()
