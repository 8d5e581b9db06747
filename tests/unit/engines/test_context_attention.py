"""Context parallelism's attention with a mask: by blocks of queries it is what it is at once."""

import pytest
import torch

context_parallel = pytest.importorskip("siirl.engines.train.megatron.context_parallel")

QUERIES, KEYS = [5, 3, 7], [9, 3, 8]
"""Tokens of each run: its own, and those that it reads."""


def attended(pairs: int, window: int | None, monkeypatch) -> list[torch.Tensor]:
    """Outputs, and the gradients of queries, keys and values, with so many pairs at once."""
    monkeypatch.setattr(context_parallel, "MASKED_PAIRS", pairs)
    draw = torch.Generator().manual_seed(1)
    ends = [torch.tensor([0, *counts]).cumsum(0).to(torch.int32) for counts in (QUERIES, KEYS)]
    shard = context_parallel.ContextShard(
        group=None,
        index_n=torch.arange(sum(QUERIES)),
        restore_N=torch.arange(sum(QUERIES)),
        query_ends=ends[0],
        key_ends=ends[1],
        key_index=torch.arange(sum(KEYS)),
        longest_query=max(QUERIES),
        longest_key=max(KEYS),
    )
    heads = [
        torch.randn(sum(counts), number, 4, generator=draw, dtype=torch.float64).requires_grad_()
        for counts, number in ((QUERIES, 4), (KEYS, 2), (KEYS, 2))
    ]
    out = context_parallel._padded(*heads, shard, None, window)
    out.sin().sum().backward()
    return [out.detach(), *(head.grad for head in heads)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("pairs", [1, 60, 81])
def test_blocks_of_queries_attend_as_all_at_once(pairs, window, monkeypatch):
    """1, 2 and 3 of up to 7 queries at once."""
    whole = attended(1 << 28, window, monkeypatch)
    for found, expected in zip(attended(pairs, window, monkeypatch), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
