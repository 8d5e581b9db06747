"""What the ranks of a run do together, or not at all."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from siirl.checkpoint.files import current_step
from siirl.disk import REFUSALS
from siirl.errors import CheckpointError, SiirlError, StorageError
from siirl.observe.spans import phase, waiting

T = TypeVar("T")
Kind = Literal["users", "disk", "other"]


class Together:
    """The ranks of a process group, at work on the checkpoints under `root`.

    group: gloo, or with gloo for CPU; None: this process alone. A thread of its own needs a group of its own.
    per_machine: so many ranks, one after another, see the same folder `root`; 0: all do.
    """

    def __init__(self, root: Path, group: dist.ProcessGroup | None, per_machine: int = 0):
        self.root = root
        self.group = group
        self.rank = rank_in(group)
        world_size = 1 if group is None else dist.get_world_size(group)
        self.per_machine = per_machine or world_size
        self.apart = self.per_machine < world_size
        """Whether there are folders of several machines."""

    @property
    def first_here(self) -> bool:
        """Whether this is the first of those that see its folder."""
        return self.rank % self.per_machine == 0

    @contextmanager
    def stage(self, step: int | None, doing: str) -> Iterator[None]:
        """All ranks get through what is inside, or all raise CheckpointError with the first one's reason.

        StorageError for what only the user can do something about.
        """
        problem: BaseException | None = None
        try:
            with phase(doing):
                yield
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - whatever it is, the peers wait for it
            problem = error
        reasons = self._reasons(problem)
        if not reasons:
            return
        rank, (reason, kind) = min(reasons.items())
        if kind == "users":
            raise StorageError(reason) from problem
        of_step = "the checkpoint" if step is None else f"the checkpoint of step {step}"
        what = f"{of_step} under {self.root} failed while {doing}, on rank {rank}: {reason}"
        if kind == "disk":
            stands = current_step(self.root)
            last = "none was saved before" if stands is None else f"the last good one is global_step_{stands}"
            raise StorageError(
                f"{what} No other checkpoint was changed: {last}. Free space, keep fewer "
                "(trainer.max_actor_ckpt_to_keep), or have it take files again; the same command then goes "
                "on from there."
            ) from problem
        raise CheckpointError(f"{what} No other checkpoint was changed.") from problem

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on the first rank; elsewhere an empty list."""
        if self.group is None:
            return [value]
        gathered: list[Any] | None = [None] * dist.get_world_size(self.group) if self.rank == 0 else None
        with waiting():
            dist.gather_object(value, gathered, group=self.group, group_dst=0)
        return gathered or []

    def gather_on_all(self, value: Any) -> list[Any]:
        """Every rank's value, on all."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        with waiting():
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def from_first(self, value: Any) -> Any:
        """The first rank's value, on all."""
        values = [value]
        if self.group is not None:
            with waiting():
                dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def _reasons(self, problem: BaseException | None) -> dict[int, tuple[str, Kind]]:
        """Rank -> what went wrong there. One small reduction when all is well."""
        own = None if problem is None else _reason(problem)
        if self.group is None:
            return {} if own is None else {0: own}
        failed = torch.tensor([float(own is not None)])
        with waiting():
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if not failed.item():
            return {}
        told: list[tuple[str, Kind] | None] = [None] * dist.get_world_size(self.group)
        with waiting():
            dist.all_gather_object(told, own, group=self.group)
        return {rank: reason for rank, reason in enumerate(told) if reason is not None}


def for_each(models: Mapping[str, T], act: Callable[[str, T], None]) -> None:
    """Act on every model, also after one failed, as other ranks wait in the next; raise the first error."""
    problems: list[BaseException] = []
    for name, model in models.items():
        try:
            act(name, model)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - raised below
            problems.append(error)
    if problems:
        raise problems[0]


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank in a group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def _reason(problem: BaseException) -> tuple[str, Kind]:
    """What went wrong, and what kind of thing it is.

    "disk": one that takes nothing more; "users": to be said as it is.
    """
    if isinstance(problem, CheckpointException):
        rank, (error, _) = min(problem.failures.items())
        text, kind = _reason(error)
        return f"{text} (its rank {rank})", kind
    if isinstance(problem, StorageError):
        return str(problem), "users"
    if isinstance(problem, SiirlError):
        return str(problem), "other"
    if isinstance(problem, OSError) and problem.errno in REFUSALS:
        where = f"{problem.filename}: " if problem.filename else ""
        return f"the disk is {REFUSALS[problem.errno]}: {where}{problem.strerror}.", "disk"
    return f"{type(problem).__name__}: {problem}.", "other"
