"""How many logits a micro-batch keeps: all where they are few, else what there is room for on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from siirl.compiler.memory.estimate import GIB, KEPT_LOGITS_BYTES
from siirl.engines.train.kept_logits import kept_logits_bytes

WORDS, HIDDEN = 150_000, 2048
MANY = 32_768
"""Tokens whose logits, in bf16, are more than are kept anywhere."""


def head(is_cuda: bool) -> SimpleNamespace:
    """What is asked of the weights of a head in bf16."""
    return SimpleNamespace(
        shape=(WORDS, HIDDEN),
        is_cuda=is_cuda,
        device="cuda:0",
        element_size=lambda: 2,
        numel=lambda: WORDS * HIDDEN,
    )


@pytest.fixture
def device_memory(monkeypatch):
    """Sets what a GPU of 100 GiB has free, and what of its own the allocator does not use."""

    def has(free: int, unused: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * GIB + unused)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 * GIB)

    return has


@pytest.mark.parametrize("is_cuda", [False, True])
def test_few_logits_are_kept_everywhere(is_cuda):
    needed = 1000 * WORDS * 2
    assert needed <= KEPT_LOGITS_BYTES
    assert kept_logits_bytes(1000, head(is_cuda)) == needed
    assert kept_logits_bytes(1000, head(is_cuda), by_room=False) == needed


def test_many_are_kept_as_there_is_room_on_a_gpu(device_memory):
    gradient = 12 * WORDS * HIDDEN
    device_memory(20 * GIB, 3 * GIB)
    assert kept_logits_bytes(MANY, head(True)) == pytest.approx(18 * GIB - gradient, abs=1)
    device_memory(5 * GIB, 1 * GIB)
    assert kept_logits_bytes(MANY, head(True)) == 0


def test_many_are_computed_again_on_a_cpu_and_beside_other_micro_batches():
    assert kept_logits_bytes(MANY, head(False)) == 0
    assert kept_logits_bytes(MANY, head(True), by_room=False) == 0


def test_nothing_is_kept_without_gradient():
    with torch.no_grad():
        assert kept_logits_bytes(1000, head(False)) == 0
