"""Routes of which every rank knows its team's rows only: who gives which to whom."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from siirl.algorithms.row_cost import row_cost
from siirl.data import teams
from siirl.data.assign import RowTable, homes, starts
from siirl.data.balance import balance
from siirl.data.header import Header
from siirl.data.loader import assignment_order
from siirl.errors import DagError
from siirl.types import Layout

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
World = importlib.import_module("scale").World


def layouts(rng: np.random.Generator, num_ranks: int, split: str, mini: int) -> tuple[Layout, Layout]:
    """Of equal ranks, with replicas on one side, apart, or overlapping."""
    ranks, one = tuple(range(num_ranks)), np.arange(num_ranks)
    kind = int(rng.integers(6))
    sources = {1: one // 2, 2: one % (num_ranks // 2)}.get(kind, one)
    targets = {3: one // 2, 2: one // 4}.get(kind, one)
    source = Layout(ranks, tuple(sources.tolist()), "rows")
    ranks = tuple((one + num_ranks * {4: 1, 5: 0.5}.get(kind, 0)).astype(int).tolist())
    return source, Layout(ranks, tuple(targets.tolist()), "rows", split, mini)


def rows_of(rng: np.random.Generator, num_ranks: int, split: str, num_batches: int):
    """A reshard of random rows, and the rows: id, group, cost, shared part, source shard."""
    samples, kind = int(rng.choice([1, 4, 8])), int(rng.integers(3))
    num_groups = num_ranks * 64 // samples
    group = np.repeat(np.arange(num_groups), samples)
    mini = len(group) // num_batches if num_batches > 1 else 0
    source, target = layouts(rng, num_ranks, split, mini)
    prompt = np.repeat(rng.integers(10, 800, num_groups), samples)
    response = [
        np.full(len(group), 700),
        np.minimum(8192, rng.lognormal(6, 0.8, len(group)).astype(int) + 1),
        rng.integers(1, 4096, len(group)),
    ][kind]
    if kind == 0:
        prompt[:] = 100
    row_id = np.arange(len(group)) * (3 if rng.random() < 0.3 else 1) + 5
    place = np.empty(num_groups, dtype=np.int64)
    place[assignment_order(num_groups, num_groups // num_batches)] = np.arange(num_groups)
    shard = place[group] * source.num_shards // num_groups
    if rng.random() < 0.2:
        shard = rng.permutation(source.num_shards)[shard]
    weight = np.stack([prompt + response, group, prompt][: 1 if split == "cost" else 3], 1)
    shard_of = dict(zip(source.ranks, source.shards, strict=True))

    def header(rank: int) -> Header:
        mine = shard == shard_of.get(rank, -1)
        return Header(row_id[mine], weight[mine], None)

    world = World(source, target, [header(rank) for rank in range(max(*source.ranks, *target.ranks) + 1)])
    by_prompt = split == "prompt_cost"
    cost = row_cost(prompt + response)
    return world, row_id, group if by_prompt else row_id, cost, row_cost(prompt) * by_prompt, shard


def loads_of(cost, group, shared, shard, num_shards: int) -> np.ndarray:
    loads = np.bincount(shard, cost - shared, num_shards)
    for number, at in {*zip(group.tolist(), shard.tolist(), strict=True)}:
        loads[at] += shared[np.searchsorted(group, number)]
    return loads


@pytest.mark.parametrize("split", ["cost", "prompt_cost"])
def test_teams_balance_as_well_as_if_all_rows_were_known_and_move_what_is_too_much(split, monkeypatch):
    """Within 2%; where a shard has 16 rows of a mini-batch, so a team two prompts a shard, within 8%."""
    monkeypatch.setattr(teams, "MOST_ROWS", 1024)
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    for case in range(16):
        num_batches = int(rng.choice([1, 1, 2, 4]))
        world, row_id, group, cost, shared, shard = rows_of(rng, 64, split, num_batches)
        ids, there = world.there()
        assert np.array_equal(ids, row_id), "each row goes to one shard"
        assert len(world.every) >= 4
        seen |= {num_batches} if world.letters else set()
        source, target = world.source, world.target
        num_shards, step = target.num_shards, target.mini_batch_rows or len(row_id)
        near = homes(source, target)
        for first in range(0, len(row_id), step):
            part = slice(first, first + step)
            rows = cost[part], group[part], shared[part]
            known = balance(*rows, starts(*rows, shard[part], near), num_shards)
            highest = loads_of(*rows, there[part], num_shards).max()
            bar = 1.02 if num_batches < 4 else 1.08
            assert highest <= bar * loads_of(*rows, known, num_shards).max(), case
        if num_batches == 1 and (source.ranks, source.shards) == (target.ranks, target.shards):
            loads = loads_of(cost, group, shared, shard, num_shards)
            excess = np.maximum(loads - loads.mean(), 0).sum()
            assert cost[there != shard].sum() <= 2.5 * excess + cost.max(), case
    assert seen == {1, 2, 4}


def test_rows_of_equal_cost_stay(monkeypatch):
    monkeypatch.setattr(teams, "MOST_ROWS", 64)
    ranks = tuple(range(16))
    for mini in (0, 256):
        source, target = Layout(ranks, ranks, "rows"), Layout(ranks, ranks, "rows", "cost", mini)
        owner = assignment_order(512, mini or 512) * 16 // 512
        owner[assignment_order(512, mini or 512)] = np.arange(512) * 16 // 512
        headers = [Header(np.flatnonzero(owner == rank), np.full((32, 1), 90), None) for rank in ranks]
        world = World(source, target, headers)
        assert len(world.every) == 8 and not world.letters
        assert np.array_equal(world.there()[1], owner)


def test_surplus_goes_to_teams_that_lack_it_in_the_order_of_teams():
    even = np.ones(4)
    assert teams.trades(np.array([160.0, 100, 60, 80]), even) == [(0, 2, 40), (0, 3, 20)]
    assert teams.trades(np.array([100.4, 100, 100, 99.6]), even) == []
    assert teams.trades(np.array([90.0, 60]), np.array([1, 2])) == [(0, 1, 40)], "by how many shards it has"


def test_a_team_gives_whole_groups_then_rows_and_no_more_than_is_asked():
    cost, shared, group = np.full(12, 10), np.full(12, 4), np.repeat([0, 1, 2], 4)  # each costs 28
    table = RowTable(np.arange(12), cost[:, None], np.zeros(12, int), np.arange(12))
    rows = teams.TeamRows(table, np.zeros(12, int), cost, group, shared, np.zeros(12, int))
    found = teams.given(rows, 0, [[(0, 1, 28.0), (0, 3, 17.0), (2, 3, 50.0)]])
    assert [len(found[1]), len(found[3])] == [4, 2] and set(found) == {1, 3}
    assert len({*group[found[1]]}) == len({*group[found[3]]}) == 1
    assert rows.cost_of(found[3]) == 16, "10 and 6, as the prompt is shared"


def test_ranks_with_other_rows_than_their_shard_and_rows_of_one_id_are_refused(monkeypatch):
    monkeypatch.setattr(teams, "MOST_ROWS", 4)
    target = Layout((0, 1, 2, 3), (0, 1, 2, 3), "rows", "cost")

    def world(shards: tuple[int, ...], *firsts: int) -> None:
        headers = [Header(np.arange(4) + first, np.full((4, 1), 90), None) for first in firsts]
        World(Layout((0, 1, 2, 3), shards, "rows"), target, headers)

    with pytest.raises(DagError, match="ranks 0 and 1 should hold the same rows of 'rows'"):
        world((0, 0, 1, 1), 0, 1, 4, 4)
    with pytest.raises(DagError, match="row_id 1, 2, 3 of 'rows' occur more than once"):
        monkeypatch.setattr(teams, "MOST_ROWS", 8)
        world((0, 1, 2, 3), 0, 1, 8, 12)


@pytest.mark.parametrize("gaps", [False, True])
def test_mini_batches_begin_at_the_same_ids_on_all_ranks(gaps):
    rng = np.random.default_rng(0)
    for total in (1, 5, 64, 1000):
        ids = np.sort(rng.choice(1 << 40, total, replace=False)) if gaps else np.arange(total) + 7
        asked = []

        def add(counts, asked=asked):
            asked.append(counts)
            return counts

        for step in (1, 7, total):
            found = teams.first_ids(ids, step, total, (int(ids[0]), int(ids[-1])), add)
            assert np.array_equal(found, ids[step::step])
        assert len(asked) <= (0 if not gaps else 3 * 8)
