"""Where a run writes, and what is done between two of its steps."""

import gc
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from siirl.observe.amendments import take
from siirl.observe.spans import waiting


class RunPlaces(Protocol):
    """Where a run writes, and which start of it this is: a launcher's job."""

    @property
    def run_id(self) -> str: ...

    @property
    def output_path(self) -> Path: ...

    @property
    def memory_dir(self) -> str: ...

    @property
    def local_world_size(self) -> int: ...

    @property
    def amendable(self) -> bool: ...

    @property
    def amendments(self) -> list[str]: ...

    def position_path(self, rank: int) -> Path: ...


class Boundary:
    """Between two steps: rank 0 looks whether another configuration is asked for, and all ranks hear of it in
    the same step. A stat, and 8 bytes from rank 0 to all."""

    def __init__(self, folder: Path, rank: int, world: dist.ProcessGroup):
        self._folder, self._rank, self._world = folder, rank, world

    def is_asked(self) -> bool:
        """Whether the workers end here, to begin again with what is asked for. Collective."""
        asked = torch.tensor([int(self._rank == 0 and take(self._folder))])
        if dist.get_world_size(self._world) > 1:
            with waiting():
                dist.broadcast(asked, group=self._world, group_src=0)
        return bool(asked)


def spare_settled_objects() -> None:
    """Have the garbage collector pass over all objects that are there now.

    Modules, engines and compiled layers are some hundred thousand objects. A full collection looks through
    them all, for half a second in which this rank, and whoever waits for it, stands still in a step. Undone
    by gc.unfreeze() at the end: libraries complain of what is left then.
    """
    gc.collect()
    gc.freeze()
