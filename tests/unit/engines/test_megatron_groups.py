"""The groups that a plan makes for a Megatron model are those that megatron-core asks for."""

import random

import pytest

from siirl.parallel.dims import ParallelDims, megatron_groups

parallel_state = pytest.importorskip("megatron.core.parallel_state")


class RecordedDistributed:
    """torch.distributed that notes the groups which are asked for."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world, self.asked = rank, world, set()

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group=None) -> int:
        return self.rank

    def get_world_size(self, group=None) -> int:
        return self.world

    def new_group(self, ranks, **options):
        self.asked.add(tuple(sorted(ranks)))
        return object()


class Torch:
    def __init__(self, distributed: RecordedDistributed):
        self.distributed = distributed

    def __getattr__(self, name):
        import torch

        return getattr(torch, name)


def asked_for(dims: ParallelDims, rank: int, monkeypatch) -> set[tuple[int, ...]]:
    from siirl.engines.train.megatron.scope import _UNUSED, _put, _take

    recorded = RecordedDistributed(rank, dims.world)
    before = _take()
    _put(_UNUSED)
    with monkeypatch.context() as patch:
        patch.setattr(parallel_state, "torch", Torch(recorded))
        patch.setattr(parallel_state, "_set_global_memory_buffer", lambda: None)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dims.tp,
            pipeline_model_parallel_size=dims.pp,
            context_parallel_size=dims.cp,
            expert_model_parallel_size=dims.ep,
            expert_tensor_parallel_size=dims.etp,
            create_gloo_process_groups=False,
        )
    _put(before)
    return recorded.asked


def test_the_listed_groups_are_those_that_megatron_asks_for(monkeypatch):
    draw = random.Random(1)
    for _ in range(100):
        tp, pp, cp, dp = (draw.choice((1, 1, 2, 3)) for _ in range(4))
        world = tp * pp * cp * dp
        choices = [(ep, etp) for ep in range(1, 7) for etp in (1, tp) if world % (ep * etp * pp) == 0]
        ep, etp = draw.choice(choices)
        dims = ParallelDims(world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp_replicate=dp)
        listed = megatron_groups(dims, range(world))
        assert set(listed) >= asked_for(dims, draw.randrange(world), monkeypatch), dims
        assert set(listed) - asked_for(dims, 0, monkeypatch) <= {tuple(range(world))}, dims
        assert len(listed) == len(set(listed))


def test_groups_are_told_in_the_ranks_of_the_model():
    dims = ParallelDims(4, tp=2, pp=2)
    listed = megatron_groups(dims, (1, 3, 5, 7))
    assert {(1, 3, 5, 7), (1, 3), (5, 7), (1, 5), (3, 7)} <= set(listed)
    assert all(rank in (1, 3, 5, 7) for line in listed for rank in line)
