"""Coordinates, groups and rows of Megatron models, against megatron-core's own order of ranks."""

import random

import pytest
from megatron_cases import megatron_plan, sizes
from plan_cases import run_symbolically

from siirl.compiler.plan_instructions import Run
from siirl.errors import PlacementError
from siirl.parallel.dims import ParallelDims
from siirl.show.plan_text import report


def random_sizes(generator: random.Random) -> ParallelDims:
    """Sizes that fit a world of at most 64 ranks; half of them have experts."""
    while True:
        tp, pp, cp = (generator.choice((1, 1, 2, 3, 4)) for _ in range(3))
        dp = generator.choice((1, 2, 3, 4, 6, 8))
        ep = generator.choice((1, 1, 2, 3, 4, 8))
        etp = generator.choice((1, 1, 2, tp))
        world = tp * pp * cp * dp
        if world <= 64 and world % (etp * ep * pp) == 0:
            return ParallelDims(world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp_replicate=dp)


def lines(places: list[dict[str, int]], fixed: tuple[str, ...]) -> set[tuple[int, ...]]:
    """The ranks that agree on these coordinates, as sorted tuples."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(tuple(place[axis] for axis in fixed), []).append(rank)
    return {tuple(ranks) for ranks in found.values()}


def test_coordinates_are_those_of_megatrons_own_rank_generator():
    pytest.importorskip("megatron.core")
    from megatron.core.parallel_state import RankGenerator

    generator = random.Random(0)
    order = "tp-cp-ep-dp-pp"
    for _ in range(300):
        dims = random_sizes(generator)
        dims.check("node 'a'", range(dims.world))
        dense = RankGenerator(tp=dims.tp, ep=1, dp=dims.dp, pp=dims.pp, cp=dims.cp, order=order)
        expert = RankGenerator(tp=dims.etp, ep=dims.ep, dp=dims.expert_dp, pp=dims.pp, cp=1, order=order)
        places = [dims.coordinates(local) for local in range(dims.world)]
        for axis, source, name, fixed in (
            ("tp", dense, "tp", ("cp", "dp", "pp")),
            ("cp", dense, "cp", ("tp", "dp", "pp")),
            ("dp", dense, "dp", ("tp", "cp", "pp")),
            ("pp", dense, "pp", ("tp", "cp", "dp")),
            ("etp", expert, "tp", ("ep", "expert_dp", "pp")),
            ("ep", expert, "ep", ("etp", "expert_dp", "pp")),
            ("expert_dp", expert, "dp", ("etp", "ep", "pp")),
        ):
            groups = source.get_ranks(name)
            assert lines(places, fixed) == {tuple(sorted(group)) for group in groups}, (dims, axis)
            for group in groups:
                assert [places[rank][axis] for rank in group] == list(range(len(group))), (dims, axis)


def test_every_row_reaches_one_data_parallel_shard_and_all_model_parallel_peers_of_it():
    pytest.importorskip("megatron.core")
    from megatron.core.parallel_state import RankGenerator

    generator = random.Random(1)
    for _ in range(300):
        dims = random_sizes(generator)
        dense = RankGenerator(tp=dims.tp, ep=1, dp=dims.dp, pp=dims.pp, cp=dims.cp, order="tp-cp-ep-dp-pp")
        shards = dims.data_shards()
        for peers in dense.get_ranks("tp-cp-pp"):
            assert len({shards[rank] for rank in peers}) == 1, dims
        for group in dense.get_ranks("dp"):
            assert sorted(shards[rank] for rank in group) == list(range(dims.dp)), dims


@pytest.mark.parametrize(
    ("world", "parallel", "shards"),
    [
        (4, {"tp": 2, "pp": 2}, (0, 0, 0, 0)),
        (8, {"tp": 2, "pp": 2}, (0, 0, 1, 1, 0, 0, 1, 1)),
        (8, {"pp": 2, "cp": 2}, (0, 0, 1, 1, 0, 0, 1, 1)),
        (6, {"pp": 3}, (0, 1, 0, 1, 0, 1)),
        (8, {"tp": 2, "cp": 2}, (0, 0, 0, 0, 1, 1, 1, 1)),
    ],
)
def test_the_layout_of_a_node_follows_the_data_parallel_coordinate(world, parallel, shards):
    kl = "actor_rollout_ref.actor.use_kl_loss=True"
    plan, _ = megatron_plan(world, *sizes(**parallel), kl)
    run_symbolically(plan)
    train = next(ins for ins in plan.instructions if isinstance(ins, Run) and ins.node == "actor_train")
    assert plan.layouts[train.source].shards == shards
    assert plan.models["agent_0.ref"].dims == plan.models["agent_0.actor"].dims


def test_the_product_of_sizes_is_held_against_the_ranks_of_the_node():
    with pytest.raises(PlacementError) as caught:
        megatron_plan(4, *sizes(tp=4, pp=2))
    assert str(caught.value) == (
        "node 'actor_train': tp(4) * pp(2) * cp(1) = 8 does not divide its 4 ranks (0-3). "
        "Give the node 8 ranks, or lower tensor_model_parallel_size to 2."
    )


def test_the_report_names_the_coordinates_of_every_rank():
    text = report(*megatron_plan(8, *sizes(tp=2, pp=2)))
    assert "agent_0.actor    megatron  0-7    tp 2, pp 2, dp 2" in text
    for line in (
        "ranks 0-1: tp 0-1, dp 0, pp 0",
        "ranks 2-3: tp 0-1, dp 1, pp 0",
        "ranks 4-5: tp 0-1, dp 0, pp 1",
        "ranks 6-7: tp 0-1, dp 1, pp 1",
    ):
        assert line in text
    experts = report(*megatron_plan(8, *sizes(pp=2, ep=2)))
    assert "ranks 2-3: dp 2-3, pp 0, ep 0-1, expert_dp 1" in experts
