"""What all ranks have, brought to the first."""

from functools import partial

import pytest
import torch.distributed as dist
from dist_harness import run_workers

from siirl.dag_worker import step_report
from siirl.dag_worker.step_report import _first_parts, _merged
from siirl.observe.metrics import Metrics


def join(rank: int, world_size: int, fan_in: int) -> tuple:
    step_report.FAN_IN = fan_in
    mine = Metrics()
    mine.mean("score", rank * 2.5, 2 + rank)
    mine.sum("tokens", 0.1 * rank)
    mine.max("longest", rank)
    if rank == world_size - 1:
        mine.min("of_the_last", 7)
    joined = step_report.join_on_first(mine, _merged, dist.group.WORLD)
    keep = partial(_first_parts, most=3)
    texts = step_report.join_on_first(
        {rank: [f"{rank}a", f"{rank}b"]} if rank else {}, keep, dist.group.WORLD
    )
    own = dist.new_group([1, 2]) if world_size > 2 else None
    pair = step_report.join_on_first([rank], list.__add__, own) if rank in (1, 2) and own else None
    return joined and joined.entries, texts, pair


@pytest.mark.parametrize(("world_size", "fan_in"), [(6, 2), (5, 1), (4, 8), (1, 8)])
def test_the_first_rank_gets_the_sum_of_all_and_the_samples_of_the_first_ranks(world_size, fan_in):
    (entries, texts, _), *others = run_workers(join, world_size, fan_in)
    assert entries["score"] == (
        "mean",
        sum(2.5 * r for r in range(world_size)),
        sum(range(2, 2 + world_size)),
    )
    assert entries["tokens"][1] == pytest.approx(sum(0.1 * r for r in range(world_size)))
    assert entries["longest"][1] == world_size - 1
    assert entries["of_the_last"][1] == 7
    assert texts == {rank: [f"{rank}a", f"{rank}b"] for rank in (1, 2) if rank < world_size}
    assert all(joined is None and kept is None for joined, kept, _ in others)
    if world_size > 2:
        assert [pair for _, _, pair in others][:2] == [[1, 2], None]
