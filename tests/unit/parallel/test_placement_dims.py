"""Parallel sizes: what fits which ranks, and which rank sits where."""

from collections import Counter

import pytest

from siirl.errors import PlacementError
from siirl.parallel.dims import ParallelDims


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            ParallelDims(4, tp=4, pp=2),
            "node 'actor_train': tp(4) * pp(2) * cp(1) = 8 does not divide its 4 ranks (0-3). "
            "Give the node 8 ranks, or lower tensor_model_parallel_size to 2.",
        ),
        (
            ParallelDims(6, pp=4),
            "node 'actor_train': tp(1) * pp(4) * cp(1) = 4 does not divide its 6 ranks (0-5). "
            "Give the node 8 ranks, or lower pipeline_model_parallel_size to 2.",
        ),
        (
            ParallelDims(5, tp=2),
            "node 'actor_train': tp(2) * pp(1) * cp(1) = 2 does not divide its 5 ranks (0-4). "
            "Give the node 6 ranks, or lower tensor_model_parallel_size to 1.",
        ),
        (
            ParallelDims(4, pp=2, ep=4, dp_replicate=2),
            "node 'actor_train': etp(1) * ep(4) * pp(2) = 8 does not divide its 4 ranks (0-3). "
            "Give the node 8 ranks, or lower expert_model_parallel_size to 2.",
        ),
        (
            ParallelDims(4, dp_shard=3, dp_replicate=2),
            "node 'actor_train': fsdp_size = 3 does not divide the 4 data-parallel ranks among its 4 ranks "
            "(0-3). Set it to -1 (all of them) or to one of 1, 2, 4.",
        ),
        (
            ParallelDims(4, vpp=2, dp_replicate=4),
            "node 'actor_train': virtual_pipeline_model_parallel_size = 2 with pp(1): it counts model chunks "
            "per pipeline rank, so it needs pipelining. Raise pipeline_model_parallel_size, or unset it.",
        ),
        (ParallelDims(4, cp=0), "node 'actor_train': context_parallel_size = 0: a size is at least 1."),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_numbers_and_a_fix(dims, message):
    with pytest.raises(PlacementError) as caught:
        dims.check("node 'actor_train'", range(dims.world))
    assert str(caught.value) == message


def test_sequence_parallelism_needs_tensor_parallelism():
    with pytest.raises(PlacementError, match=r"sequence_parallel with tp\(1\)"):
        ParallelDims(2, dp_replicate=2).check("node 'a'", range(2), sequence_parallel=True)
    ParallelDims(2, tp=2).check("node 'a'", range(2), sequence_parallel=True)


def test_ranks_are_ordered_as_megatron_orders_them_by_default():
    dims = ParallelDims(16, tp=2, pp=2, cp=2, dp_replicate=2)
    dims.check("node 'a'", range(16))
    places = [dims.coordinates(local) for local in range(16)]
    assert [place["tp"] for place in places] == [0, 1] * 8
    assert [place["cp"] for place in places] == [0, 0, 1, 1] * 4
    assert [place["dp"] for place in places] == ([0] * 4 + [1] * 4) * 2
    assert [place["pp"] for place in places] == [0] * 8 + [1] * 8
    assert dims.data_shards() == (0, 0, 0, 0, 1, 1, 1, 1) * 2


def test_experts_see_the_same_ranks_in_their_own_grid():
    dims = ParallelDims(16, tp=2, pp=2, ep=4, dp_replicate=4)
    dims.check("node 'a'", range(16))
    assert dims.expert_dp == 2
    places = [dims.coordinates(local) for local in range(16)]
    assert [place["ep"] for place in places] == [0, 1, 2, 3] * 4
    wide = ParallelDims(8, tp=2, ep=2, etp=2, dp_replicate=4)
    assert [wide.coordinates(local)["etp"] for local in range(8)] == [0, 1] * 4
    assert [wide.coordinates(local)["ep"] for local in range(8)] == [0, 0, 1, 1] * 2


@pytest.mark.parametrize(
    ("dims", "axes"),
    [
        (ParallelDims(1), {"dp_shard": ((10,),)}),
        (ParallelDims(4, dp_shard=4), {"dp_shard": ((10, 12, 14, 16),)}),
        (
            ParallelDims(4, dp_shard=2, dp_replicate=2),
            {"dp_shard": ((10, 12), (14, 16)), "dp_replicate": ((10, 14), (12, 16))},
        ),
    ],
)
def test_mesh_groups_of_fsdp_are_world_ranks_along_each_axis(dims, axes):
    assert dims.mesh_groups(tuple(range(10, 10 + 2 * dims.world, 2))) == axes


def test_every_axis_partitions_the_ranks_into_groups_of_its_size():
    dims = ParallelDims(24, tp=2, pp=3, cp=2, dp_replicate=2)
    groups = dims.mesh_groups(tuple(range(24)))
    for axis, size in (("tp", 2), ("pp", 3), ("cp", 2), ("dp_replicate", 2)):
        assert Counter(map(len, groups[axis])) == {size: 24 // size}
        assert sorted(rank for group in groups[axis] for rank in group) == list(range(24))
