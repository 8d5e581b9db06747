"""Rows become packed micro-batches and come back: every row once, within limits, balanced, in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl.algorithms.row_cost import row_cost
from siirl.data.rows import make_rows
from siirl.engines.train.packing import (
    MicroBatchLimit,
    count_micro_batches,
    pack_rows,
    row_lengths,
    split_rows,
)
from siirl.errors import ConfigError, DataError

CPU = torch.device("cpu")
LIMITS = [MicroBatchLimit(max_tokens=40), MicroBatchLimit(max_rows=3), MicroBatchLimit(max_tokens=1)]


def some_rows():
    return make_rows(
        {
            "prompt_ids": torch.tensor([[0, 0, 11], [21, 22, 23], [0, 31, 32], [0, 0, 41]]),
            "prompt_length": torch.tensor([1, 3, 2, 1]),
            "response_ids": torch.tensor([[12, 13], [24, 0], [0, 0], [42, 43]]),
            "response_length": torch.tensor([2, 1, 0, 2]),
        }
    )


def test_packed_tokens_leave_out_padding_and_the_last_response_token():
    batch = pack_rows(some_rows(), CPU)
    assert batch.input_ids.tolist() == [[11, 12, 21, 22, 23, 41, 42]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    assert batch.bounds.cu_seqlens.tolist() == [0, 2, 5, 7]
    assert batch.bounds.padded_index.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert batch.bounds.max_length == 3
    assert batch.target.tolist() == [12, 13, 24, 42, 43]
    assert batch.predict_index.tolist() == [0, 1, 4, 5, 6]


def test_results_return_to_the_places_of_their_tokens_and_carry_gradient():
    batch = pack_rows(some_rows(), CPU)
    value = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    cells = batch.to_cells(value)
    assert cells.tolist() == [[1, 2], [3, 0], [0, 0], [4, 5]]
    (cells * torch.arange(8.0).view(4, 2)).sum().backward()
    assert value.grad.tolist() == [0, 1, 2, 6, 7]


@pytest.mark.parametrize("num_rows", [0, 2])
def test_rows_without_responses_make_a_dummy_of_zeros_that_hangs_on_the_graph(num_rows):
    rows = some_rows()[:num_rows]
    rows["response_length"] = torch.zeros_like(rows["response_length"])
    batch = pack_rows(rows, CPU)
    assert batch.is_dummy
    value = torch.tensor([5.0], requires_grad=True)
    cells = batch.to_cells(value)
    assert cells.shape == (num_rows, 2)
    cells.sum().backward()
    assert value.grad.tolist() == [0]


def test_a_response_without_a_prompt_is_refused_by_row():
    rows = some_rows()
    rows["prompt_length"] = torch.tensor([1, 0, 2, 1])
    with pytest.raises(DataError, match="row 1 has a response of 1 tokens and no prompt"):
        pack_rows(rows, CPU)


@given(
    lengths=st.lists(st.integers(0, 60), max_size=40),
    limit=st.sampled_from(LIMITS),
    spare=st.integers(0, 3),
)
@settings(deadline=None)
def test_every_row_lands_in_one_micro_batch_within_the_limit(lengths, limit, spare):
    num = count_micro_batches(lengths, limit) + spare
    micro_batches = split_rows(lengths, limit, num, hidden_size=8)
    assert len(micro_batches) == num
    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    for rows in micro_batches:
        if limit.max_rows is not None:
            assert len(rows) <= limit.max_rows
        elif len([row for row in rows if lengths[row]]) > 1:
            assert sum(lengths[row] for row in rows) <= limit.max_tokens
    costs = [sum(row_cost(lengths[row], 8) for row in rows) for rows in micro_batches]
    assert costs == sorted(costs, reverse=True)


def test_balance_goes_by_cost_not_by_tokens():
    lengths = [100, 25, 25, 25, 25]
    (first, second) = split_rows(lengths, MicroBatchLimit(max_tokens=10_000), 2, hidden_size=1)
    assert first == [0]
    assert second == [1, 2, 3, 4]
    assert row_cost(100, 1) > sum(row_cost(25, 1) for _ in range(4))


def test_balanced_micro_batches_of_a_real_batch_differ_little():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(300, 1280, (256,), generator=draw).tolist()
    limit = MicroBatchLimit(max_tokens=32_000)
    micro_batches = split_rows(lengths, limit, count_micro_batches(lengths, limit), 2048)
    assert len(micro_batches) == -(-sum(lengths) // 32_000)
    costs = [sum(row_cost(lengths[row], 2048) for row in rows) for rows in micro_batches]
    assert max(costs) < 1.02 * min(costs)


def test_row_lengths_count_prompt_and_response():
    assert row_lengths(some_rows()) == [3, 4, 2, 3]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 0}, {"max_rows": -1}, {"max_tokens": 5, "max_rows": 5}])
def test_a_micro_batch_limit_must_be_one_positive_number(limit):
    with pytest.raises(ConfigError, match="micro-batch limit"):
        MicroBatchLimit(**limit)
