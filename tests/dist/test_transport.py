import functools
import importlib
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dist_harness import WorkerFailure, run_workers
from some_cases import some
from tensordict import TensorDict

import siirl.data.teams
from siirl.algorithms.row_cost import row_cost
from siirl.compiler.plan import RoutePlan
from siirl.data.header import Header
from siirl.data.rows import make_rows, objects, take_rows
from siirl.data.store import FieldStore
from siirl.data.transport import Transport
from siirl.errors import DagError, DeadlineError
from siirl.parallel.process_groups import ProcessGroupManager
from siirl.types import FieldKey, Layout

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
World = importlib.import_module("scale").World
WORLD = 4
ROUTING = ("row_id", "group_id", "prompt_length", "response_length")


def whole_batch(rng: np.random.Generator, num_groups: int) -> TensorDict:
    """A batch with every kind of column, before it is split over ranks. Padding is zero."""
    group_id = np.repeat(np.arange(num_groups) * 3, rng.integers(1, 5, num_groups))
    n = len(group_id)
    prompt_length, response_length = rng.integers(1, 6, n), rng.integers(0, 9, n)
    numbers = torch.from_numpy(rng.standard_normal((n, 9)).astype(np.float32))
    mask = torch.arange(9) < torch.from_numpy(response_length)[:, None]
    real_prompt = torch.arange(6).flip(0) < torch.from_numpy(prompt_length)[:, None]
    columns = {
        "row_id": torch.from_numpy(np.sort(rng.choice(10 * n + 1, n, replace=False))),
        "group_id": torch.from_numpy(group_id),
        "prompt_length": torch.from_numpy(prompt_length),
        "response_length": torch.from_numpy(response_length),
        "prompt_ids": torch.from_numpy(rng.integers(1, 99, (n, 6))) * real_prompt,
        "response_ids": torch.from_numpy(rng.integers(1, 99, (n, 9))) * mask,
        "response_mask": mask,
        "finish_reason": torch.from_numpy(rng.integers(0, 2, n)).to(torch.int8),
        "rollout_log_prob": torch.where(numbers > 1, torch.nan, numbers),
        "half": numbers[:, :3].to(torch.bfloat16),
        "cube": numbers[:, :8].reshape(n, 2, 4).double(),
        "nothing": torch.zeros(n, 0),
        "ground_truth": [("", "a", "ü\n", '"')[i % 4] for i in range(n)],
        "reward_info": [{"i": i, "x": [1.5 * i, None]} if i % 2 else {} for i in range(n)],
    }
    return make_rows(columns, n)


def random_layout(rng: np.random.Generator) -> Layout:
    ranks = tuple(sorted(rng.choice(WORLD, rng.integers(1, WORLD + 1), replace=False).tolist()))
    num_shards = int(rng.integers(1, len(ranks) + 1))
    shards = rng.permutation([*range(num_shards), *rng.integers(0, num_shards, len(ranks) - num_shards)])
    split = str(rng.choice(["group", "cost", "prompt_cost"]))
    return Layout(ranks, tuple(shards.tolist()), "agent_0.samples", split, int(rng.choice([0, 5])))


def random_positions(rng: np.random.Generator, n: int, num_shards: int) -> list[list[int]]:
    """The rows of each source shard, split in any way: uneven, out of order, some shards empty."""
    owner = rng.integers(0, num_shards if rng.random() < 0.8 else 1, n)
    order = rng.permutation(n) if rng.random() < 0.5 else np.arange(n)
    return [[int(row) for row in order if owner[row] == shard] for shard in range(num_shards)]


def trimmed(rows: TensorDict) -> TensorDict:
    """Prompts and responses cut to this rank's longest, as a rank would make them."""
    if len(rows):
        rows["prompt_ids"] = rows["prompt_ids"][:, -int(rows["prompt_length"].max()) :]
        rows["response_ids"] = rows["response_ids"][:, : int(rows["response_length"].max())]
    return rows


def assert_same_rows(got: TensorDict, want: TensorDict) -> None:
    """Bit for bit, but for the width of the columns that a source may have trimmed."""
    assert sorted(got.keys()) == sorted(want.keys())
    for name in sorted(want.keys()):
        ours, theirs = got.get(name), want.get(name)
        if not isinstance(theirs, torch.Tensor):
            assert objects(got, name) == objects(want, name), name
            continue
        if name == "prompt_ids":
            theirs = theirs[:, theirs.shape[1] - ours.shape[1] :]
        if name == "response_ids":
            theirs = theirs[:, : ours.shape[1]]
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
        if ours.numel():
            assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), (
                name
            )


@functools.cache
def transport(timeout_s: float = 30) -> Transport:
    world = range(dist.get_world_size())
    groups = [ranks for size in world for ranks in itertools.combinations(world, size + 1)]
    return Transport(ProcessGroupManager(groups, "gloo", timeout_s), torch.device("cpu"), row_cost)


def route_of(source: Layout, target: Layout) -> RoutePlan:
    return RoutePlan("there", "source", "target", tuple(sorted({*source.ranks, *target.ranks})))


def keys_of(rows: TensorDict) -> list[FieldKey]:
    return [FieldKey(0, name) for name in sorted(rows.keys())]


def runs_of_groups(batch: TensorDict, num_shards: int) -> list[list[int]]:
    """The rows of each source shard as a rollout leaves them."""
    groups = np.unique(batch["group_id"].numpy())
    firsts = groups[len(groups) * np.arange(1, num_shards) // num_shards]
    cuts = np.searchsorted(batch["group_id"].numpy(), firsts)
    return [part.tolist() for part in np.split(np.arange(len(batch)), cuts)]


def random_case(seed: int) -> tuple[TensorDict, Layout, Layout, list[list[int]], bool]:
    rng = np.random.default_rng(seed)
    batch = whole_batch(rng, int(rng.choice([0, 1, 3, 12])))
    source, target = random_layout(rng), random_layout(rng)
    if len(batch) and rng.random() < 0.3:
        batch["row_id"] = torch.arange(len(batch)) + int(rng.integers(9))
        source = replace(source, split="group")
        return batch, source, target, runs_of_groups(batch, source.num_shards), False
    return (
        batch,
        source,
        target,
        random_positions(rng, len(batch), source.num_shards),
        bool(rng.random() < 0.5),
    )


def there_and_back(rank: int, seed: int) -> list[int] | None:
    """Some columns go to the target, then the others, then all but the routing ones back. Row ids there."""
    batch, source, target, positions, trim = random_case(seed)
    route = route_of(source, target)
    if rank not in route.ranks:
        return None
    store, keys = FieldStore(10), keys_of(batch)
    mine = take_rows(batch, positions[source.shard_of(rank)]) if rank in source.ranks else None
    if mine is not None:
        store.put(trimmed(mine.clone(recurse=False)) if trim else mine, 0, "source", mine.keys())
    first = [key for key in keys if key.name in (*ROUTING, "half", "ground_truth")]
    for part in (first, [key for key in keys if key not in first]):
        transport().exchange(store, part, route, source, target)
    there = None
    if rank in target.ranks:
        got = store.view(keys, "target")
        there = got["row_id"].tolist()
        where = {row_id: row for row, row_id in enumerate(batch["row_id"].tolist())}
        assert_same_rows(got, take_rows(batch, [where[row_id] for row_id in there]))
    travellers = [key for key in keys if key.name not in ROUTING]
    if mine is not None:
        store.drop([(key, "source") for key in travellers])
    back = RoutePlan("back", "target", "source", route.ranks)
    transport().exchange(store, travellers, back, target, source)
    if mine is not None:
        assert_same_rows(store.view(keys, "source"), mine)
    return there


def run_cases(
    rank: int, world_size: int, num_cases: int, most_rows: int, pairwise: bool
) -> list[list[int] | None]:
    siirl.data.teams.MOST_ROWS = most_rows
    transport().pairwise = pairwise
    results = []
    for seed in range(num_cases):
        try:
            results.append(there_and_back(rank, seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {random_case(seed)[1:]}") from error
    return results


@pytest.mark.parametrize("num_cases", some([12, 80], 12))
@pytest.mark.parametrize(("most_rows", "pairwise"), [(4096, True), (4096, False), (12, True), (0, True)])
def test_random_layouts_keep_every_column_bit_for_bit_and_split_rows_as_promised(
    most_rows, pairwise, num_cases
):
    """most_rows: of a team; where it is 0, each shard is one. pairwise: else rows go in one all-to-all."""
    by_rank = run_workers(run_cases, WORLD, num_cases, most_rows, pairwise, deadline_s=240)
    for seed in range(num_cases):
        batch, _, target, _, _ = random_case(seed)
        of_shard: dict[int, list[int]] = {}
        for rank, shard in zip(target.ranks, target.shards, strict=True):
            there = by_rank[rank][seed]
            assert of_shard.setdefault(shard, there) == there, "ranks of a shard hold the same rows"
            assert there == sorted(there)
        shards = [of_shard[shard] for shard in range(target.num_shards)]
        row_id = batch["row_id"].tolist()
        assert sorted(itertools.chain(*shards)) == row_id, "each row is on one shard"
        if target.split == "group":
            assert list(itertools.chain(*shards)) == row_id, "runs of rows"
            group_of = dict(zip(row_id, batch["group_id"].tolist(), strict=True))
            groups = [{group_of[row] for row in rows} for rows in shards]
            assert sum(map(len, groups)) == len(set(group_of.values())), "whole groups"


def stay_or_go(rank: int, world_size: int, lengths: list[list[int]]) -> tuple[list[int], int]:
    """row ids on this rank, and bytes that it sent: rows of such lengths go to shards of equal cost."""
    ranks = tuple(range(world_size))
    source = Layout(ranks, ranks, "agent_0.samples")
    target = Layout(ranks, ranks, "agent_0.samples", "cost", 0)
    first = sum(map(len, lengths[:rank]))
    rows = simple_rows(first, len(lengths[rank]), response_length=torch.tensor(lengths[rank]))
    before, store = transport().sent_bytes, exchange_two(rank, rows, target, source)
    return store.view([FieldKey(0, "row_id")], "target")["row_id"].tolist(), transport().sent_bytes - before


def test_rows_stay_where_they_are_unless_a_rank_has_more_than_its_part():
    row_bytes = 4 * 8
    even = run_workers(stay_or_go, WORLD, [[7] * 8] * WORLD)
    assert even == [(list(range(8 * rank, 8 * rank + 8)), 0) for rank in range(WORLD)]
    uneven = run_workers(stay_or_go, WORLD, [[7] * 12, [7] * 8, [7] * 6, [7] * 6])
    assert [len(ids) for ids, _ in uneven] == [8] * WORLD
    assert [sent for _, sent in uneven] == [4 * row_bytes, 0, 0, 0]
    assert sorted(itertools.chain(*(ids for ids, _ in uneven))) == list(range(32))


def length_of(row_id: int) -> int:
    return 1 + row_id * 7 % 13 + (2 - row_id // 32) * 20


def two_teams(rank: int, world_size: int) -> tuple[list[int], list[float]]:
    """Ids and scores that arrive: rows of the first two ranks are long; a team is two ranks."""
    siirl.data.teams.MOST_ROWS = 32
    ids = torch.arange(16) + 16 * rank
    lengths = torch.tensor([length_of(row_id) for row_id in ids.tolist()])
    rows = simple_rows(16 * rank, 16, response_length=lengths, score=ids * 0.5)
    ranks = tuple(range(world_size))
    source = Layout(ranks, ranks, "agent_0.samples")
    store = exchange_two(rank, rows, replace(source, split="cost", mini_batch_rows=32), source)
    there = store.view([FieldKey(0, "row_id"), FieldKey(0, "score")], "target")
    return there["row_id"].tolist(), there["score"].tolist()


def test_rows_that_a_team_gives_to_another_go_to_several_of_its_ranks(monkeypatch):
    by_rank = run_workers(two_teams, WORLD)
    assert sorted(itertools.chain(*(ids for ids, _ in by_rank))) == list(range(64))
    for ids, scores in by_rank:
        assert scores == [row_id * 0.5 for row_id in ids]
    weight = np.array([[1 + length_of(row_id)] for row_id in range(64)])
    ranks = tuple(range(WORLD))
    source = Layout(ranks, ranks, "agent_0.samples")
    headers = [Header(np.arange(16) + 16 * rank, weight[16 * rank : 16 * rank + 16], None) for rank in ranks]
    monkeypatch.setattr(siirl.data.teams, "MOST_ROWS", 32)
    _, there = World(source, replace(source, split="cost", mini_batch_rows=32), headers).there()
    assert [ids for ids, _ in by_rank] == [np.flatnonzero(there == rank).tolist() for rank in ranks]
    assert all(set(there[:32]) >= {rank} for rank in (2, 3)), "both of the second team got rows of the first"


TWO = Layout((0, 1), (0, 1), "agent_0.samples")
ONE = Layout((0,), (0,), "agent_0.samples")


def simple_rows(first: int, n: int, **columns) -> TensorDict:
    ids = torch.arange(first, first + n)
    return make_rows({"row_id": ids, "group_id": ids.clone(), "prompt_length": ids * 0 + 1, **columns}, n)


def exchange_two(rank: int, rows: TensorDict, target: Layout = ONE, source: Layout = TWO) -> FieldStore:
    store = FieldStore(10)
    if rank in source.ranks:
        store.put(rows, 0, "source", rows.keys())
    transport().exchange(store, keys_of(rows), route_of(source, target), source, target)
    return store


def misuse(rank: int, world_size: int) -> dict[str, str]:
    mismatched = torch.zeros(2) if rank else torch.zeros(2, dtype=torch.int64)
    ragged = torch.zeros(2, 3, 4 + rank)
    shared = Layout((0, 1), (0, 0), "agent_0.samples")
    cases = {
        "dtype": lambda: exchange_two(rank, simple_rows(2 * rank, 2, score=mismatched)),
        "dims": lambda: exchange_two(rank, simple_rows(2 * rank, 2, cube=ragged)),
        "repeated": lambda: exchange_two(rank, simple_rows(rank, 2)),
        "replicas": lambda: exchange_two(rank, simple_rows(rank, 2), ONE, shared),
    }
    errors = {}
    for name, case in cases.items():
        try:
            case()
        except DagError as error:
            errors[name] = str(error)
    return errors


def test_ranks_that_contradict_each_other_are_all_told_why():
    expected = {
        "dtype": "int64 [] on rank 0, but of float32 [] on rank 1",
        "dims": "only the first of these dimensions may differ",
        "repeated": "row_id 1 of 'agent_0.samples' occur more than once",
        "replicas": "ranks 0 and 1 should hold the same rows",
    }
    for errors in run_workers(misuse, 2):
        assert {name for name, text in expected.items() if text in errors[name]} == set(expected)


def number_rows_from_zero_on_every_rank(rank: int, world_size: int) -> str:
    siirl.data.teams.MOST_ROWS = 2
    try:
        exchange_two(rank, simple_rows(0, 4), replace(TWO, split="cost"))
    except DagError as error:
        return str(error)
    return "no error"


def test_rows_that_ranks_number_alike_are_refused_where_no_rank_knows_all():
    for message in run_workers(number_rows_from_zero_on_every_rank, 2):
        assert "row_id of 8 rows of 'agent_0.samples' occur more than once" in message


def reshard_with_a_held_layout(rank: int, world_size: int, held: list[list[int]]) -> list[float] | str:
    """Rows 0-5 are split 3/3; the target layout already holds them in another way."""
    store = FieldStore(10)
    rows = simple_rows(3 * rank, 3, score=torch.arange(3.0) + 3 * rank)
    store.put(rows, 0, "source", rows.keys())
    store.put(make_rows({"row_id": held[rank]}), 0, "target", ["row_id"])
    try:
        transport().exchange(store, [FieldKey(0, "score")], route_of(TWO, TWO), TWO, TWO)
    except DagError as error:
        return str(error)
    return store.view([FieldKey(0, "score")], "target")["score"].tolist()


def test_rows_go_where_the_target_layout_already_has_them():
    assert run_workers(reshard_with_a_held_layout, 2, [[5, 1], [0, 4, 3, 2]]) == [[5, 1], [0, 4, 3, 2]]
    for message in run_workers(reshard_with_a_held_layout, 2, [[5, 1], [0, 4, 3]]):
        assert "already holds 5 rows, others than the 6" in message


def reshard_into_columns_of_unknown_rows(rank: int, world_size: int, others: list[list[int]]) -> str | list:
    """The target holds scores, their row_id gone; then those of another agent, whose row_id is there."""
    store = FieldStore(10)
    rows = simple_rows(3 * rank, 3, score=torch.arange(3.0) + 3 * rank)
    store.put(rows, 0, "source", rows.keys())
    theirs = {"row_id": others[rank], "score": [float(row_id) for row_id in others[rank]]}
    store.put(make_rows(theirs), 1, "target", ["score"])
    message = ""
    try:
        transport().exchange(store, [FieldKey(0, "score")], route_of(TWO, TWO), TWO, TWO)
    except AssertionError as error:
        message = str(error)
    store.put(make_rows(theirs), 1, "target", ["row_id"])
    transport().exchange(store, [FieldKey(0, "score")], route_of(TWO, TWO), TWO, TWO)
    return [message, store.view([FieldKey(0, "score")], "target")["score"].tolist()]


def test_rows_are_never_dealt_anew_beside_columns_of_their_layout():
    others = [[5, 1, 2], [0, 4, 3]]
    for rank, (message, scores) in enumerate(run_workers(reshard_into_columns_of_unknown_rows, 2, others)):
        assert "route there: layout 'target' holds agent_1.score without row_id" in message
        assert scores == others[rank], "rows of two agents that pair up follow one order"


def wait_for_a_late_rank(rank: int, world_size: int) -> str:
    short = transport(1.0)
    if rank == 1:
        time.sleep(4)
        return ""
    store = FieldStore(10)
    rows = simple_rows(0, 2)
    store.put(rows, 0, "source", rows.keys())
    try:
        short.exchange(store, keys_of(rows), route_of(TWO, ONE), TWO, ONE)
    except DeadlineError as error:
        return str(error)
    return "no error"


def test_a_late_rank_is_named_at_the_deadline():
    message = run_workers(wait_for_a_late_rank, 2)[0]
    assert "route there (source -> target): rank 0 waited 1 s for the headers of rank 1" in message


def move_objects_that_are_not_json(rank: int, world_size: int) -> None:
    rows = simple_rows(2 * rank, 2, extra_info=[{1, 2}, None])
    exchange_two(rank, rows)


def test_an_object_that_is_not_json_is_refused_when_it_has_to_move():
    with pytest.raises(WorkerFailure, match=r"extra_info cannot move to another rank.*JSON values only"):
        run_workers(move_objects_that_are_not_json, 2, deadline_s=20)


def reshard_two_agents_and_a_pending_column(rank: int, world_size: int) -> list:
    store = FieldStore(10)
    rows = simple_rows(2 * rank, 2)
    store.put(rows, 0, "source", rows.keys())
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(lambda: (time.sleep(0.05), make_rows({"score": [rank + 0.5] * 2}))[1])
        store.put(later, 1, "source", ["score"])
        store.put(make_rows({"score": [float(rank)] * 2}), 0, "source", ["score"])
        keys = [*keys_of(rows), FieldKey(0, "score"), FieldKey(1, "score")]
        transport().exchange(store, keys, route_of(TWO, ONE), TWO, ONE)
    if rank == 1:
        return []
    seen = store.view([FieldKey(0, "score"), FieldKey(1, "score")], "target", agent=0)
    return [seen["score"].tolist(), seen["agent_1.score"].tolist()]


def test_columns_of_two_agents_and_pending_columns_travel_together():
    assert run_workers(reshard_two_agents_and_a_pending_column, 2)[0] == [[0, 0, 1, 1], [0.5, 0.5, 1.5, 1.5]]


def reshard_in_place(rank: int, world_size: int) -> tuple[bool, int, int]:
    """Nothing has to move: the columns are shared, and only headers were sent."""
    mover = transport()
    store = FieldStore(10)
    rows = simple_rows(3 * rank, 3, extra_info=[{1, 2}] * 3)
    store.put(rows, 0, "source", rows.keys())
    mover.exchange(store, keys_of(rows), route_of(TWO, TWO), TWO, TWO)
    shared = store.column(FieldKey(0, "row_id"), "target") is store.column(FieldKey(0, "row_id"), "source")
    dist.barrier()
    return shared, mover.sent_bytes, store.num_bytes()


def test_rows_that_stay_are_shared_and_nothing_is_sent():
    assert run_workers(reshard_in_place, 2) == [(True, 0, 3 * 3 * 8)] * 2


def move_many_rows_then_replicated_rows(rank: int, world_size: int) -> tuple[list[int], int]:
    """More rows than fit into the first headers; then rows that both ranks hold are split between them."""
    rows = simple_rows(5000 * rank, 5000)
    store = exchange_two(rank, rows)
    there = store.view([FieldKey(0, "row_id")], "target")["row_id"].tolist() if rank == 0 else []
    before = transport().sent_bytes
    shared = Layout((0, 1), (0, 0), "agent_0.samples")
    store = exchange_two(rank, simple_rows(0, 8), TWO, shared)
    assert (
        store.view([FieldKey(0, "row_id")], "target")["row_id"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]
    )
    return there, transport().sent_bytes - before


def test_long_headers_take_a_second_round_and_a_rank_sends_nothing_that_the_other_has():
    results = run_workers(move_many_rows_then_replicated_rows, 2)
    assert results[0][0] == list(range(10000))
    assert [sent for _, sent in results] == [0, 0]
