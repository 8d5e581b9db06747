"""Beside a GPU operations on host tensors run in one thread, but for those that say that theirs are large."""

import pytest
import torch

from siirl.parallel import host_threads


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(host_threads, "SHARE_OF_CORES", 4)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("device", "threads"), [("cuda", 1), ("cpu", 4)])
def test_threads_of_a_worker(four_cores, device, threads):
    host_threads.set_host_threads(torch.device(device))
    assert torch.get_num_threads() == threads


def test_large_tensors_have_all_cores_and_give_them_back(four_cores):
    host_threads.set_host_threads(torch.device("cuda"))
    with pytest.raises(ZeroDivisionError), host_threads.all_host_threads():
        assert torch.get_num_threads() == 4
        raise ZeroDivisionError
    assert torch.get_num_threads() == 1
