"""What the ranks of a run do together, or not at all."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from siirl.errors import CheckpointError, SiirlError
from siirl.observe.spans import phase

T = TypeVar("T")


class Together:
    """The ranks of a process group, at work on the checkpoints under `root`.

    group: gloo, or with gloo for CPU; None: this process alone. A thread of its own needs a group of its own.
    """

    def __init__(self, root: Path, group: dist.ProcessGroup | None):
        self.root = root
        self.group = group
        self.rank = rank_in(group)

    @contextmanager
    def stage(self, step: int | None, doing: str) -> Iterator[None]:
        """All ranks get through what is inside, or all raise CheckpointError with the first one's reason."""
        problem: BaseException | None = None
        try:
            with phase(doing):
                yield
        except (
            Exception,
            CheckpointException,
        ) as error:  # whatever it is, the peers must learn of it: they wait
            problem = error
        reasons = self._reasons(problem)
        if not reasons:
            return
        rank, reason = min(reasons.items())
        of_step = "the checkpoint" if step is None else f"the checkpoint of step {step}"
        raise CheckpointError(
            f"{of_step} under {self.root} failed while {doing}, on rank {rank}: {reason} "
            "No other checkpoint was changed."
        ) from problem

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on the first rank; elsewhere an empty list."""
        if self.group is None:
            return [value]
        gathered: list[Any] | None = [None] * dist.get_world_size(self.group) if self.rank == 0 else None
        dist.gather_object(value, gathered, group=self.group, group_dst=0)
        return gathered or []

    def from_first(self, value: Any) -> Any:
        """The first rank's value, on all."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def _reasons(self, problem: BaseException | None) -> dict[int, str]:
        """Rank -> what went wrong there. One small reduction when all is well."""
        text = None if problem is None else _reason(problem)
        if self.group is None:
            return {} if text is None else {0: text}
        failed = torch.tensor([float(text is not None)])
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if not failed.item():
            return {}
        texts: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(texts, text, group=self.group)
        return {rank: text for rank, text in enumerate(texts) if text is not None}


def for_each(models: Mapping[str, T], act: Callable[[str, T], None]) -> None:
    """Act on every model, also after one failed, as other ranks wait in the next; raise the first error."""
    problems: list[BaseException] = []
    for name, model in models.items():
        try:
            act(name, model)
        except (Exception, CheckpointException) as error:
            problems.append(error)
    if problems:
        raise problems[0]


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank in a group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def _reason(problem: BaseException) -> str:
    if isinstance(problem, CheckpointException):
        rank, (error, _) = min(problem.failures.items())
        return f"{_reason(error)} (its rank {rank})"
    if isinstance(problem, SiirlError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}."
