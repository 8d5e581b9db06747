from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dist_harness import run_workers
from tensordict import TensorDict

from siirl.config.batch import BatchArithmetic
from siirl.nodes import mini_batches

BATCH = BatchArithmetic(prompts=4, samples=2, mini_prompts=2, epochs=1, in_rounds=False, round_prompts=None)
CASES = {
    "no id left out": [[9, 7, 12, 13], [8, 10, 11, 14]],
    "ids left out": [[9, 7, 120, 13], [8, 10, 11, 14]],
    "an empty shard": [[0, 1, 2, 3, 4, 5, 6, 7], []],
    "none": [[], []],
}


def cut(rank: int, world_size: int) -> tuple[list[list[list[int]]], int]:
    """Row ids of each mini-batch of this rank, where two ranks have the same rows; and how often all ids were
    gathered."""
    ctx, gathered = SimpleNamespace(group=dist.group.WORLD, is_shard_leader=rank % 2 == 0, taken=None), []
    everything = mini_batches.global_positions
    mini_batches.global_positions = lambda *given: gathered.append(given) or everything(*given)
    found = []
    for shards in CASES.values():
        ids = torch.tensor(shards[rank // 2], dtype=torch.int64)
        rows = TensorDict({"row_id": ids}, [len(ids)])
        found.append([ids[mine_B].tolist() for mine_B in mini_batches.mini_batches(ctx, rows, BATCH, None)])
    return found, len(gathered)


@pytest.fixture(scope="module")
def by_rank():
    return run_workers(cut, 4)


@pytest.mark.parametrize("name", CASES)
def test_mini_batches_are_runs_of_all_rows_in_the_order_of_their_ids(by_rank, name):
    place = list(CASES).index(name)
    every = sorted(CASES[name][0] + CASES[name][1])
    of_rank = [found[place] for found, _ in by_rank]
    assert of_rank[0] == of_rank[1] and of_rank[2] == of_rank[3], "ranks with the same rows agree"
    together = [sorted(one + other) for one, other in zip(of_rank[0], of_rank[2], strict=True)]
    assert together == [every[first : first + BATCH.mini_rows] for first in range(0, len(every), 4)]


def test_ids_are_gathered_only_where_some_are_skipped(by_rank):
    assert [gathered for _, gathered in by_rank] == [2] * 4, "ids left out, and no rows at all"
