"""The boundary of a Megatron model: megatron-core sees the ranks of its node as the whole world.

megatron-core keeps its parallel state in module globals, numbers ranks by torch's default group, and calls
some collectives without a group. Inside `with scope:` all three belong to one model: the globals are the
model's own, the default process group is the group of its ranks, and ranks are numbered from 0. Outside,
nothing of it is left. So models of different parallel sizes live side by side in one process, on any ranks.

The groups come from ProcessGroupManager, which made them from the plan (siirl/parallel/dims.py);
models with the same rank tuples share them. So on two ranks with PP2 and VPP the pipeline's group is the
default one as well, which Megatron uses for one direction of its messages: these take turns then, in an order
that is the same on both ranks, so that none waits in a circle. Uses private parts of torch.distributed
(`_world.pg_group_ranks`, `_update_default_pg`), checked with torch 2.11 and 2.13. One thread per process runs
Megatron code.
"""

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import megatron.core.parallel_state as parallel_state
import megatron.core.tensor_parallel.random as generators
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d as c10d

from siirl.engines.train.megatron import cpu_shim
from siirl.parallel.dims import ParallelDims, megatron_groups
from siirl.parallel.process_groups import ProcessGroupManager

_GLOBALS = [
    (parallel_state, name)
    for name in vars(parallel_state)
    if re.fullmatch(r"_[A-Z][A-Z0-9_]*|_global_process_group_list", name)
] + [(generators, "_CUDA_RNG_STATE_TRACKER"), (generators, "_CUDA_RNG_STATE_TRACKER_INITIALIZED")]


def _take() -> list[Any]:
    """The values of all globals; dicts copied, as Megatron fills them in place."""
    values = [getattr(module, name) for module, name in _GLOBALS]
    return [dict(value) if isinstance(value, dict) else value for value in values]


def _put(values: list[Any]) -> None:
    for (module, name), value in zip(_GLOBALS, values, strict=True):
        setattr(module, name, value)


_UNUSED = _take()  # before any model exists


class MegatronScope:
    """The parallel state of one model on the ranks of its node; a context manager, which may be nested.

    Build it on all of these ranks (no others, no communication). `groups`: megatron-core's collection of this
    rank's process groups.
    """

    def __init__(self, ranks: Sequence[int], dims: ParallelDims, groups: ProcessGroupManager, seed: int):
        """seed: of Megatron's generators, which no computation of ours draws from."""
        self._ranks = tuple(ranks)
        self._default = groups.get(self._ranks)
        self._members = {
            groups.get(line): {ranks.index(rank): place for place, rank in enumerate(line)}
            for line in megatron_groups(dims, self._ranks)
            if groups.rank in line
        }
        self._entered: list[tuple[Any, ...]] = []
        self._state = _UNUSED
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), self:
            parallel_state.torch = _ScopedTorch(self._ranks, groups)
            try:
                self._initialize(dims, seed)
            finally:
                parallel_state.torch = torch
            names = set(ProcessGroupCollection.__dataclass_fields__) - {"inter_dist_opt", "hcp"}
            self.groups = ProcessGroupCollection.use_mpu_process_groups(sorted(names))

    def _initialize(self, dims: ParallelDims, seed: int) -> None:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dims.tp,
            pipeline_model_parallel_size=dims.pp,
            virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
            context_parallel_size=dims.cp,
            expert_model_parallel_size=dims.ep,
            expert_tensor_parallel_size=dims.etp,
            create_gloo_process_groups=False,
        )
        generators.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    def __enter__(self) -> "MegatronScope":
        known = c10d._world.pg_group_ranks
        outside = {group: known[group] for group in self._members}
        self._entered.append((_take(), c10d._world.default_pg, outside, cpu_shim.enter()))
        _put(self._state)
        known.update(self._members)
        c10d._update_default_pg(self._default)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state = _take()
        values, default, group_ranks, leave_shim = self._entered.pop()
        _put(values)
        c10d._world.pg_group_ranks.update(group_ranks)
        c10d._update_default_pg(default)
        leave_shim()


class _ScopedDistributed:
    """torch.distributed as parallel_state sees it while it builds its groups: they exist already."""

    def __init__(self, ranks: Sequence[int], groups: ProcessGroupManager):
        self._ranks, self._groups = ranks, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        line = tuple(sorted(self._ranks[local] for local in ranks))
        if self._groups.rank not in line:
            return dist.GroupMember.NON_GROUP_MEMBER
        return self._groups.get(line)


class _ScopedTorch:
    """torch, with the scope's view of torch.distributed."""

    def __init__(self, ranks: Sequence[int], groups: ProcessGroupManager):
        self.distributed = _ScopedDistributed(ranks, groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
