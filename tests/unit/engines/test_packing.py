"""Rows become packed micro-batches and come back: every row once, within limits, balanced, in place."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl.algorithms.row_cost import row_cost
from siirl.data.rows import make_rows
from siirl.engines.train.megatron.context_parallel import context_shard
from siirl.engines.train.packed.micro_batches import (
    MicroBatchLimit,
    bundles_of,
    count_bundles,
    prompt_numbers,
    repeated_prompt_tokens,
    row_lengths,
    sharing_pays,
    single_rows,
    split_bundles,
)
from siirl.engines.train.packed.packing import pack_rows, packed_tokens
from siirl.engines.train.packed.sequence_bounds import with_segment
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
    words = batch.to_cells(torch.ones(1, 3, dtype=torch.int64))
    assert words.dtype == torch.int64 and words.tolist() == [[[0] * 3] * 2] * num_rows


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
    bundles = single_rows(lengths, hidden_size=8)
    num = count_bundles(bundles, limit) + spare
    micro_batches = split_bundles(bundles, limit, num)
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
    (first, second) = split_bundles(single_rows(lengths, 1), MicroBatchLimit(max_tokens=10_000), 2)
    assert first == [0]
    assert second == [1, 2, 3, 4]
    assert row_cost(100, 1) > sum(row_cost(25, 1) for _ in range(4))


def test_balanced_micro_batches_of_a_real_batch_differ_little():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(300, 1280, (256,), generator=draw).tolist()
    limit = MicroBatchLimit(max_tokens=32_000)
    bundles = single_rows(lengths, 2048)
    micro_batches = split_bundles(bundles, limit, count_bundles(bundles, limit))
    assert len(micro_batches) == -(-sum(lengths) // 32_000)
    costs = [sum(row_cost(lengths[row], 2048) for row in rows) for rows in micro_batches]
    assert max(costs) < 1.02 * min(costs)


def test_row_lengths_count_prompt_and_response():
    assert row_lengths(some_rows()) == [3, 4, 2, 3]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 0}, {"max_rows": -1}, {"max_tokens": 5, "max_rows": 5}])
def test_a_micro_batch_limit_must_be_one_positive_number(limit):
    with pytest.raises(ConfigError, match="micro-batch limit"):
        MicroBatchLimit(**limit)


@st.composite
def rows_of_few_prompts(draw):
    """Rows of at most four prompts, some of one token, some without response."""
    kinds = draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
    lengths = draw(st.lists(st.integers(0, 5), min_size=len(kinds), max_size=len(kinds)))
    num_prompt = torch.tensor([1, 2, 3, 3])
    prompts = torch.tensor([[0, 0, 7], [0, 8, 7], [5, 8, 7], [6, 8, 7]])
    ids = 100 + torch.arange(len(kinds) * 5).view(len(kinds), 5)
    length_B = torch.tensor(lengths)
    return make_rows(
        {
            "prompt_ids": prompts[kinds],
            "prompt_length": num_prompt[kinds],
            "response_ids": ids * (torch.arange(5) < length_B[:, None]),
            "response_length": length_B,
        }
    )


@given(rows_of_few_prompts())
@settings(deadline=None)
def test_a_prompt_of_several_rows_is_packed_once_and_each_token_follows_what_it_did(rows):
    """Walking back from each target by segments gives the row up to it."""
    batch = pack_rows(rows, CPU, share_prompts=True)
    if batch.is_dummy:
        assert not bool(rows["response_length"].any())
        return
    used = (rows["response_length"] > 0).tolist()
    answered = [row for row in range(len(rows)) if used[row]]
    prompts = [
        rows["prompt_ids"][row, -int(rows["prompt_length"][row]) :].tolist() for row in range(len(rows))
    ]
    once = sum(map(len, {tuple(prompts[row]) for row in answered}))
    ids, ends = batch.input_ids[0].tolist(), batch.bounds.cu_seqlens.tolist()
    assert len(ids) == once + int((rows["response_length"] - 1).clamp(min=0).sum())
    assert len(ids) == packed_tokens(rows, share_prompts=True)
    pieces = [ids[a:b] for a, b in itertools.pairwise(ends)]
    parent = parents(batch, len(pieces))
    if batch.bounds.keys is not None:  # where prompts are not too long for one call of attention
        read, ends_of_read = batch.input_ids[0, batch.bounds.keys.index].tolist(), batch.bounds.keys.ends
        seen = [read[a:b] for a, b in itertools.pairwise(ends_of_read.tolist())]
        before = [[] if of is None else pieces[of] for of in parent]
        assert seen == [first + piece for first, piece in zip(before, pieces, strict=True)]
    at = 0
    for row in answered:
        length = int(rows["response_length"][row])
        response = rows["response_ids"][row, :length].tolist()
        for place in range(length):
            where = int(batch.predict_index[at])
            segment = next(i for i in range(len(pieces)) if where < ends[i + 1])
            seen = ids[ends[segment] : where + 1]
            if parent[segment] is not None:
                seen = pieces[parent[segment]] + seen
            assert seen == prompts[row] + response[:place]
            assert int(batch.position_ids[0, where]) == len(seen) - 1
            assert (int(batch.target[at]), int(batch.cell[at])) == (response[place], row * 5 + place)
            at += 1
    assert at == len(batch.target)


def parents(batch, num: int) -> list[int | None]:
    """Of each segment, the shared prompt before it."""
    shared = batch.bounds.shared
    if shared is None:
        return [None] * num
    ends, found = batch.bounds.cu_seqlens.tolist(), []
    for start in ends[:-1]:
        place = start - shared.responses.start
        inside = 0 <= place < sum(shared.totals)
        of = torch.searchsorted(shared.response_ends[1:], place, right=True).item() if inside else None
        found.append(of)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@given(rows=rows_of_few_prompts(), shares=st.booleans())
@settings(deadline=None)
def test_ranks_that_cut_the_stream_read_for_each_token_its_row_up_to_it(size, rows, shares):
    batch = pack_rows(rows, CPU, share_prompts=shares)
    extra = -batch.input_ids.numel() % (2 * size)
    bounds = with_segment(batch.bounds, extra) if extra else batch.bounds
    ids = [*batch.input_ids[0].tolist(), *range(-extra, 0)]
    ends = bounds.cu_seqlens.tolist()
    parent = [*parents(batch, batch.bounds.num_sequences), None]
    held = []
    for rank in range(size):
        shard = context_shard(bounds, SimpleNamespace(size=lambda: size, rank=lambda at=rank: at), CPU)
        mine, read = shard.index_n.tolist(), shard.key_index.tolist()
        held += mine
        runs = (itertools.pairwise(x.tolist()) for x in (shard.query_ends, shard.key_ends))
        for (first, last), (begin, end) in zip(*runs, strict=True):
            assert last - first <= shard.longest_query and end - begin <= shard.longest_key
            for place in range(first, last):  # the last query sees all keys of its run, others fewer
                seen = [ids[key] for key in read[begin : end - (last - 1 - place)]]
                segment = next(i for i, after in enumerate(ends[1:]) if mine[place] < after)
                of = parent[segment]
                prompt = [] if of is None else ids[ends[of] : ends[of + 1]]
                assert seen == prompt + ids[ends[segment] : mine[place] + 1]
    assert sorted(held) == list(range(len(ids)))


@pytest.mark.parametrize(("prompt", "pays"), [(7, False), (8, True), (30, True)])
def test_prompts_are_shared_where_that_saves_a_tenth_of_the_tokens(prompt, pays):
    rows = make_rows(
        {
            "prompt_ids": torch.ones(8, 30, dtype=torch.int64),
            "prompt_length": torch.full((8,), prompt),
            "response_ids": torch.zeros(8, 56, dtype=torch.int64),
            "response_length": torch.full((8,), 56),
        }
    )
    assert sharing_pays(rows) is pays
    rows["prompt_ids"][:, -prompt:] = torch.arange(8).unsqueeze(1)
    assert not sharing_pays(rows)


@given(rows=rows_of_few_prompts(), limit=st.sampled_from([*LIMITS, MicroBatchLimit(max_tokens=9)]))
@settings(deadline=None)
def test_rows_of_a_prompt_come_together_and_count_it_once(rows, limit):
    bundles = bundles_of(rows, limit, 8, share_prompts=True)
    assert sorted(row for bundle in bundles for row in bundle.rows) == list(range(len(rows)))
    lengths, numbers = row_lengths(rows), prompt_numbers(rows)
    first_rows = [numbers.index(number) for number in set(numbers)]
    again = sum(repeated_prompt_tokens(rows))
    assert int(rows["prompt_length"].sum()) - again == int(rows["prompt_length"][first_rows].sum())
    for bundle in bundles:
        first, *more = bundle.rows
        assert {numbers[row] for row in more} <= {numbers[first]}
        own = sum(lengths[row] - int(rows["prompt_length"][row]) for row in more)
        assert bundle.tokens == lengths[first] + own
        assert not more or limit.size(bundle) <= limit.most
    num = count_bundles(bundles, limit)
    for index in split_bundles(bundles, limit, num + 1):
        held = [bundle for bundle in bundles if set(bundle.rows) <= set(index)]
        assert len(held) <= 1 or sum(map(limit.size, held)) <= limit.most
    if limit.max_rows is not None:
        assert num == -(-len(rows) // limit.max_rows)


@pytest.mark.parametrize(
    ("max_tokens", "num", "cuts"),
    [
        (33_792, 4, 0),  # four prompts each
        (27_000, 6, 0),  # three: cut ones would not be fewer
        (24_576, 6, 5),  # two and a part, not eight of two
        (12_000, 12, 8),  # one and a part, not sixteen of one
    ],
)
def test_prompts_are_cut_where_that_takes_fewer_micro_batches(max_tokens, num, cuts):
    """16 prompts of 256 tokens, 8 responses of 1,024 to each."""
    prompts_GP = torch.arange(16).unsqueeze(1).expand(16, 256)
    rows = make_rows(
        {
            "prompt_ids": prompts_GP.repeat_interleave(8, 0),
            "prompt_length": torch.full((128,), 256),
            "response_ids": torch.zeros(128, 1024, dtype=torch.int64),
            "response_length": torch.full((128,), 1024),
        }
    )
    limit = MicroBatchLimit(max_tokens=max_tokens)
    bundles = bundles_of(rows, limit, 2048, share_prompts=True)
    assert (count_bundles(bundles, limit), len(bundles)) == (num, 16 + cuts)
    assert sum(bundle.tokens for bundle in bundles) == 16 * (256 + 8 * 1024) + cuts * 256
    micro_batches = split_bundles(bundles, limit, num)
    assert sorted(row for held in micro_batches for row in held) == list(range(128))
    most, mean = max(map(len, micro_batches)), 128 / num
    assert most < 1.2 * mean


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("shares", [False, True])
def test_the_rows_of_a_pair_are_in_one_micro_batch_whatever_it_may_hold(limit, shares):
    rows = some_rows()
    rows["pair_id"] = torch.tensor([7, 3, 7, 3])
    bundles = bundles_of(rows, limit, 8, shares)
    assert sorted(bundle.rows for bundle in bundles) == [(0, 2), (1, 3)]
    assert sum(bundle.tokens for bundle in bundles) == sum(row_lengths(rows)) or shares
    micro_batches = split_bundles(bundles, limit, count_bundles(bundles, limit))
    assert all({0, 2} <= set(rows) or not {0, 2} & set(rows) for rows in micro_batches)
    assert sorted(itertools.chain(*micro_batches)) == [0, 1, 2, 3]
