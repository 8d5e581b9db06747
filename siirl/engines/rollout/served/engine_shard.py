"""The ranks that share an engine: those of a tensor-parallel group."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from siirl.compiler.plan import ModelPlan
from siirl.errors import NotSupportedError
from siirl.parallel.process_groups import ProcessGroupManager


@dataclass(frozen=True)
class EngineShard:
    """The first rank owns the engine's process; all of them come to each call."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    """None: one rank has the engine for itself."""

    @property
    def is_first(self) -> bool:
        """Whether this rank owns the process."""
        return self.group is None or dist.get_rank(self.group) == 0

    @property
    def place(self) -> int:
        """Of this rank among them; its worker of the engine has the same."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def share(self, value: Any) -> Any:
        """What the first rank gives, on all of them; plain values and records."""
        box = [value]
        if self.group is not None:
            dist.broadcast_object_list(box, src=self.ranks[0], group=self.group)
        return box[0]

    def gather(self, mine: Any) -> list[Any]:
        """A JSON value of each rank."""
        if self.group is None:
            return [mine]
        parts: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(parts, mine, group=self.group)
        return parts

    def meet(self) -> None:
        """Wait for all of them."""
        if self.group is not None:
            dist.all_reduce(torch.zeros(1), group=self.group)


def engine_shard(plan: ModelPlan, groups: ProcessGroupManager | None) -> EngineShard:
    """This rank's, of an engine of the plan. groups: None outside of a run."""
    if plan.dims.tp == 1:
        return EngineShard((plan.ranks[0],))
    if groups is None:
        raise NotSupportedError("not supported yet: tensor parallelism outside of a run")
    ranks = next(ranks for ranks in plan.dims.mesh_groups(plan.ranks)["tp"] if groups.rank in ranks)
    return EngineShard(ranks, groups.get(ranks))


def physical_gpu(device: torch.device) -> str:
    """The name of this worker's GPU outside of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[device.index or 0].strip() if visible else str(device.index or 0)
