"""Ranks that share rows attend as one rank does, whatever their heads; each predicts what follows its tokens.

The ranks are threads here, which exchange through memory: tests/contracts runs the same on processes.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_engine_cases import NUM_ROWS, sample_rows

from siirl.data.rows import take_rows
from siirl.engines.train.attention import ulysses
from siirl.engines.train.attention.packed_attention import packed_attention
from siirl.engines.train.attention.ulysses import of_all_tokens, own_tokens, whole_sequences
from siirl.engines.train.packed.packing import PackedBatch, pack_rows
from siirl.engines.train.packed.sequence_bounds import SequenceShard
from siirl.errors import NotSupportedError

SIZE, OF_VALUES, EXPERTS = 8, 6, 3


class Exchange:
    """What ranks that are threads put into the middle and take from there."""

    def __init__(self, ranks: int):
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._parts: list[Any] = [None] * ranks

    def all(self, rank: int, part: Tensor) -> list[Tensor]:
        self._parts[rank] = part
        self._barrier.wait()
        found = list(self._parts)
        self._barrier.wait()
        return found


class Rank:
    """A process group as ulysses.py uses it, seen by one of its ranks."""

    def __init__(self, rank: int, exchange: Exchange, ranks: int):
        self._rank, self._exchange, self._ranks = rank, exchange, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks

    def all_to_all(self, received: Tensor, x: Tensor) -> None:
        received.copy_(torch.stack([part[self._rank] for part in self._exchange.all(self._rank, x)]))

    def all_gather(self, whole: Tensor, x: Tensor) -> None:
        whole.copy_(torch.cat(self._exchange.all(self._rank, x)))


@pytest.fixture(autouse=True)
def exchanges(monkeypatch):
    by_threads = SimpleNamespace(
        all_to_all_single=lambda received, x, group: group.all_to_all(received, x),
        all_gather_into_tensor=lambda whole, x, group: group.all_gather(whole, x),
        ProcessGroup=Rank,
    )
    monkeypatch.setattr(ulysses, "dist", by_threads)


def attended(inputs: list[Tensor], batch: PackedBatch, along: Tensor, window: int | None) -> list[Tensor]:
    """What comes out for these tokens, and the gradients of what went in."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    options = {"sequence_bounds": batch.bounds, "scaling": 0.3, "sliding_window": window}
    out, _ = packed_attention(nn.Module(), *inputs, None, **options)
    return [out, *torch.autograd.grad((out * along).sum(), inputs)]


def drawn(seed: int) -> tuple[PackedBatch, int, tuple[int, int], int | None]:
    """A packed batch, ranks, heads of queries and of keys, and a window."""
    draw = random.Random(seed)
    ranks, kv_heads = draw.choice((2, 3, 4)), draw.choice((1, 2, 3, 4))
    heads = ranks * kv_heads * draw.choice((1, 2))
    shares = draw.random() < 0.5
    rows = take_rows(sample_rows(seed), sorted(draw.sample(range(NUM_ROWS), draw.choice((1, 4, NUM_ROWS)))))
    length = rows["prompt_ids"].shape[1], rows["response_ids"].shape[1]
    for name, width in zip(("prompt_experts", "response_experts"), length, strict=True):
        rows[name] = torch.randint(0, 9, (len(rows), width, EXPERTS)).short()
    window = None if shares or draw.random() < 0.5 else 3
    return pack_rows(rows, torch.device("cpu"), shares), ranks, (heads, kv_heads), window


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_share_rows_attend_as_one_does(seed):
    batch, ranks, (heads, kv_heads), window = drawn(seed)
    num = batch.input_ids.shape[1]
    torch.manual_seed(seed)
    shapes = ((heads, SIZE), (kv_heads, SIZE), (kv_heads, OF_VALUES))
    inputs = [torch.randn(1, many, num, size, dtype=torch.float64) for many, size in shapes]
    along = torch.randn(1, num, heads, OF_VALUES, dtype=torch.float64)
    expected = attended(inputs, batch, along, window)
    extra, exchange = -num % ranks, Exchange(ranks)

    def of_rank(rank: int) -> tuple[PackedBatch, list[Tensor], Tensor]:
        mine = own_tokens(batch, Rank(rank, exchange, ranks))
        tokens = mine.bounds.shard.tokens
        own = [F.pad(x, (0, 0, 0, extra))[:, :, tokens] for x in inputs]
        weight = F.pad(along, (0, 0, 0, 0, 0, extra))[:, tokens]
        experts = mine.input_ids[0, :, None] if mine.experts is None else mine.experts
        seen = of_all_tokens(experts, mine.bounds.shard, num)
        return mine, attended(own, mine, weight, window), seen

    with ThreadPoolExecutor(ranks) as pool:
        parts = list(pool.map(of_rank, range(ranks)))
    for index, whole in enumerate(expected):
        found = torch.cat([tensors[index] for _, tensors, _ in parts], dim=1 if index == 0 else 2)
        torch.testing.assert_close(found.narrow(1 if index == 0 else 2, 0, num), whole, atol=1e-12, rtol=0)
    check_tokens(batch, [mine for mine, _, _ in parts])
    for _, _, seen in parts:
        assert torch.equal(seen, (batch.input_ids[0, :, None] if batch.is_dummy else batch.experts).int())


def check_tokens(batch: PackedBatch, parts: list[PackedBatch]) -> None:
    """Every token and every prediction is with one rank, and each prediction with the token before it."""
    num = batch.input_ids.shape[1]
    assert len({part.input_ids.shape[1] for part in parts}) == 1
    assert sum(part.num_tokens for part in parts) == num
    for name in ("input_ids", "position_ids"):
        assert torch.equal(
            torch.cat([getattr(part, name) for part in parts], 1)[:, :num], getattr(batch, name)
        )
    triples = [predictions(part, part.bounds.shard.tokens.start) for part in parts]
    assert sorted(one for part in triples for one in part) == sorted(predictions(batch, 0))


def predictions(batch: PackedBatch, first: int) -> list[tuple[int, int, int]]:
    """The token before, the token, and its place; first: of this rank's tokens among all."""
    columns = batch.predict_index + first, batch.target, batch.cell
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_heads_that_do_not_divide_are_refused_where_the_configuration_did_not_tell():
    x = torch.zeros(4, 6, SIZE)
    shard = SequenceShard(Rank(0, Exchange(4), 4), slice(0, 4), 4)
    with pytest.raises(
        NotSupportedError, match=r"size=4 for a layer of 6 attention heads: .*Set it to a div"
    ):
        whole_sequences(x, x, x, shard)
