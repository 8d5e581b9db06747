"""Shards of equal cost, where rows stay as far as that goes."""

import numpy as np
import pytest

from siirl.data.assign import homes, starts
from siirl.data.balance import NOWHERE, assign_groups, balance
from siirl.types import Layout


def loads_of(cost, group, shared, shard, num_shards: int) -> np.ndarray:
    """What each shard computes: the common part of its rows of a group once."""
    loads = np.zeros(num_shards)
    for at in range(num_shards):
        for number in np.unique(group[shard == at]):
            mine = (shard == at) & (group == number)
            loads[at] += (cost - shared)[mine].sum() + shared[mine].max()
    return loads


def random_rows(rng: np.random.Generator):
    """cost, group, shared, start, num_shards of some rows of groups that lie whole on shards in runs."""
    num_shards, samples = int(rng.choice([2, 3, 4, 8])), int(rng.choice([1, 2, 8]))
    num_groups = max(num_shards, int(rng.choice([2, 4, 8, 32])) * num_shards // samples)
    group = np.repeat(np.arange(num_groups), samples)
    prompt = np.repeat(rng.integers(1, 900, num_groups), samples)
    kind = rng.integers(4)
    if kind == 0:
        length = prompt * 0 + 500
    elif kind == 1:
        length = np.minimum(8192, rng.lognormal(6, 1, len(group)).astype(int) + 1)
    elif kind == 2:
        length = np.repeat(rng.integers(200, 4000, num_groups), samples) + rng.integers(0, 500, len(group))
    else:
        length = rng.integers(1, 8192, len(group))
    cost = (prompt + length) * (24_576 + prompt + length)
    start = (np.arange(num_groups) * num_shards // num_groups)[group]
    if rng.random() < 0.2:
        start = rng.integers(NOWHERE, num_shards, len(group))
    if rng.random() < 0.5:
        return cost, np.arange(len(group)), 0 * cost, start, num_shards
    return cost, group, prompt * (24_576 + prompt), start, num_shards


def test_the_costliest_shard_costs_as_much_as_if_all_rows_were_dealt_anew():
    rng, stayed = np.random.default_rng(0), []
    for case in range(400):
        cost, group, shared, start, num_shards = random_rows(rng)
        shard = balance(cost, group, shared, start, num_shards)
        assert shard.shape == cost.shape and shard.min() >= 0 and shard.max() < num_shards, case
        anew = assign_groups(cost, group, shared, num_shards)
        highest = loads_of(cost, group, shared, shard, num_shards).max()
        assert highest <= 1.02 * loads_of(cost, group, shared, anew, num_shards).max(), case
        assert np.array_equal(shard, balance(cost, group, shared, start, num_shards)), "it is one function"
        stayed.append((shard == start).mean())
    assert np.mean(stayed) > 0.6


@pytest.mark.parametrize("samples", [1, 8])
def test_rows_of_equal_cost_stay(samples):
    for num_shards in (2, 3, 8, 64):
        group = np.repeat(np.arange(8 * num_shards // samples), samples)
        start = np.repeat(np.arange(num_shards), 8)
        cost, shared = np.full(len(group), 100), np.full(len(group), 30 if samples > 1 else 0)
        assert np.array_equal(balance(cost, group, shared, start, num_shards), start)


def test_no_more_moves_than_is_too_much():
    rng = np.random.default_rng(1)
    for _ in range(50):
        num_shards = int(rng.choice([2, 4, 8]))
        cost = rng.integers(100, 1000, 256 * num_shards)
        start = np.repeat(np.arange(num_shards), 256)
        loads = np.bincount(start, cost)
        shard = balance(cost, np.arange(len(cost)), 0 * cost, start, num_shards)
        assert cost[shard != start].sum() <= np.maximum(loads - loads.mean(), 0).sum()
        assert np.bincount(shard, cost).max() <= 1.011 * loads.mean()


def test_a_group_moves_whole_and_only_one_that_is_too_large_in_pieces():
    group, start = np.repeat(np.arange(8), 4), np.repeat([0, 0, 0, 0, 0, 1, 2, 3], 4)
    shard = balance(np.full(32, 10), group, np.full(32, 6), start, 4)
    assert np.bincount(shard).tolist() == [8, 8, 8, 8]
    assert all(len(set(shard[group == number])) == 1 for number in range(8))
    one = np.zeros(16, dtype=np.int64)
    assert np.bincount(balance(np.full(16, 10), one, one + 2, one, 4)).tolist() == [4, 4, 4, 4]
    assert balance(one[:0], one[:0], one[:0], one[:0], 4).tolist() == []


def test_rows_that_no_shard_has_are_dealt():
    cost = np.arange(1, 33)
    shard = balance(cost, cost, 0 * cost, np.full(32, NOWHERE), 4)
    assert np.bincount(shard, cost).tolist() == [132] * 4


def test_rows_start_on_the_ranks_that_have_them():
    source = Layout((0, 1, 2, 3, 4), (0, 0, 1, 2, 3), "agent_0.samples")
    target = Layout((0, 1, 2, 3), (0, 1, 2, 2), "agent_0.samples", "cost")
    near = homes(source, target)
    assert near == [(0, 1), (2,), (2,), ()]
    shard = np.repeat([0, 1, 2, 3], 4)
    cost = np.array([9, 1, 2, 8] * 4)
    start = starts(cost, np.arange(16), 0 * cost, shard, near)
    assert start[4:].tolist() == [2] * 8 + [NOWHERE] * 4
    assert np.bincount(start[:4], cost[:4]).tolist() == [10, 10], "of two shards that have them, evenly"
