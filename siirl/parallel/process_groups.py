"""The process groups of a run: the one place that creates them. Needs torch.distributed to be initialised."""

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch.distributed as dist

from siirl.errors import PlacementError


def connect_when_used() -> None:
    """Have ranks of a gloo group connect when they first talk to each other. Call it before any is made.

    Else gloo connects every rank of a group to every other as it is made: 10,000 sockets a rank and group.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


class ProcessGroupManager:
    """Every process group of a plan, created in one order on all ranks.

    Building it is collective over the world: all ranks pass the same `groups`, also those they are not in.
    """

    def __init__(self, groups: Sequence[tuple[int, ...]], backend: str, timeout_s: float):
        """Create one group for each rank tuple, in the given order.

        groups: distinct, each strictly increasing; one rank or the whole world make a group like any other.
        backend: "gloo" or "cpu:gloo,cuda:nccl". timeout_s: deadline of each collective of these groups.
        """
        world_size = dist.get_world_size()
        for ranks in groups:
            assert ranks and all(a < b for a, b in pairwise(ranks)), f"ranks out of order: {ranks}"
            if ranks[0] < 0 or ranks[-1] >= world_size:
                raise PlacementError(
                    f"process group of {name_ranks(ranks)}: the world has {world_size} ranks "
                    f"(0-{world_size - 1}). Start as many workers as the plan was compiled for."
                )
        assert len(set(groups)) == len(groups), "a group is listed twice"
        self.rank = dist.get_rank()
        self.world_size = world_size
        self.backend = backend
        self.timeout_s = timeout_s
        self._groups = {
            tuple(ranks): dist.new_group(ranks, timedelta(seconds=timeout_s), backend) for ranks in groups
        }

    @property
    def world(self) -> dist.ProcessGroup:
        """The default group: all ranks of the run."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def get(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of exactly these ranks. PlacementError if the plan has none or this rank is not in it."""
        ranks = tuple(ranks)
        if ranks not in self._groups:
            known = ", ".join(name_ranks(known) for known in self._groups) or "none"
            raise PlacementError(
                f"no process group of {name_ranks(ranks)}: groups are created once, from the plan, "
                f"which lists {known}. Add the ranks to Plan.groups."
            )
        if self.rank not in ranks:
            raise PlacementError(
                f"rank {self.rank} asked for the process group of {name_ranks(ranks)}: "
                "only members may use it."
            )
        return self._groups[ranks]

    def twins(self, groups: Sequence[Sequence[int]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Further gloo groups of the same ranks, for a thread that works beside the main one.

        Collective over the world: all ranks pass the same `groups`. Those that this rank is not in are left
        out.
        """
        timeout = timedelta(seconds=self.timeout_s)
        made = {tuple(ranks): dist.new_group(ranks, timeout, "gloo") for ranks in groups}
        return {ranks: group for ranks, group in made.items() if self.rank in ranks}


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks as people write them: (0, 1, 2, 5) -> "ranks 0-2,5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
