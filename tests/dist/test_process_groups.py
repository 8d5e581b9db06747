import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_harness import WorkerFailure, run_workers

from siirl.errors import PlacementError
from siirl.parallel.process_groups import ProcessGroupManager, name_ranks

GROUPS = ((0, 1, 2), (0, 2), (1,), (0, 1), (0,))


def sum_of_ranks(group: dist.ProcessGroup) -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=group)
    return int(total)


def use_every_group(rank: int, world_size: int) -> dict:
    groups = ProcessGroupManager(GROUPS, "gloo", 30)
    sums = {ranks: sum_of_ranks(groups.get(ranks)) for ranks in GROUPS if rank in ranks}
    errors = {}
    for ranks in ((1, 2), (0,), (1,), [0, 1]):
        try:
            groups.get(ranks)
        except PlacementError as error:
            errors[tuple(ranks)] = str(error)
    own_group_for_world = groups.get((0, 1, 2)) is not groups.world
    try:
        ProcessGroupManager(((0, 3),), "gloo", 30)
    except PlacementError as error:
        errors[0, 3] = str(error)
    dist.barrier()
    return {"sums": sums, "errors": errors, "own": own_group_for_world}


def test_groups_reduce_over_exactly_their_ranks_and_refuse_others():
    results = run_workers(use_every_group, 3)
    for rank, result in enumerate(results):
        assert result["sums"] == {ranks: sum(ranks) for ranks in GROUPS if rank in ranks}
        assert result["own"]
        assert "no process group of ranks 1-2" in result["errors"][1, 2] and "0,2" in result["errors"][1, 2]
        assert "has 3 ranks (0-2)" in result["errors"][0, 3]
        refused = {ranks for ranks, text in result["errors"].items() if "only members" in text}
        assert refused == {ranks for ranks in ((0,), (1,), (0, 1)) if rank not in ranks}


def num_sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def send_to_the_next(rank: int, world_size: int) -> dict[str, int]:
    """Sockets that are new: for groups of all ranks, and then for rows that ranks 0 and 1 exchange."""
    begin = num_sockets()
    ranks = tuple(range(world_size))
    groups = [dist.new_group(ranks, backend="gloo") for _ in range(4)]
    made = num_sockets()
    if rank < 2:
        mine, theirs = torch.tensor([rank]), torch.tensor([-1])
        sent = dist.isend(mine, 1 - rank, groups[0])
        dist.recv(theirs, 1 - rank, groups[0])
        sent.wait()
        assert theirs.item() == 1 - rank
    return {"groups": made - begin, "pair": num_sockets() - made}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="sockets are counted in /proc")
def test_sockets_are_those_of_ranks_that_talk():
    world = 8
    results = run_workers(send_to_the_next, world, deadline_s=120)
    for rank, found in enumerate(results):
        assert found["groups"] <= 4 * 2, "a group of 8 that connects all ranks has 7 on each"
        assert found["pair"] <= (2 if rank < 2 else 0), f"rank {rank} has new ones for others' rows"


def test_ranks_are_named_as_runs():
    table = {(0,): "rank 0", (0, 1, 2, 5): "ranks 0-2,5", (1, 3): "ranks 1,3", (0, 1, 4, 5): "ranks 0-1,4-5"}
    assert {ranks: name_ranks(ranks) for ranks in table} == table


def fail_on_rank_1(rank: int, world_size: int, how: str) -> int:
    if rank == 1 and how == "raise":
        raise ValueError("the cause")
    if rank == 1 and how == "hang":
        sleep_in_a_named_function()
    return rank


def sleep_in_a_named_function() -> None:
    time.sleep(100)


@pytest.mark.parametrize(
    ("how", "expected"), [("raise", "ValueError: the cause"), ("hang", "sleep_in_a_named_function")]
)
def test_harness_shows_where_a_worker_failed_or_hung(how, expected):
    with pytest.raises(WorkerFailure, match=expected):
        run_workers(fail_on_rank_1, 2, how, deadline_s=3)
    assert run_workers(fail_on_rank_1, 2, "not at all") == [0, 1]
