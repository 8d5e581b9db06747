"""Thousands of ranks as groups: who is in which, where they are, and which of them a timeline shows."""

import random

import pytest
from plan_cases import add_agent, compiled
from test_critical_path import MEETING, drawn, schedule

from siirl.dag.spec import DagBuilder
from siirl.runs.run_state import RankState
from siirl.view import rank_groups as lanes_module
from siirl.view.critical_path import Part, ranks_of_path, replay
from siirl.view.rank_groups import RankGroup, cells, group_lanes, places, rank_groups
from siirl.view.trace_reader import Interval, RankTrace

TP = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"


def two_agents():
    """Agents 0 and 1 on ranks 0-3 and 4-7; two ranks have the same rows."""
    dag = DagBuilder("two")
    add_agent(dag, 0, placement="0-3")
    add_agent(dag, 1, placement="4-7")
    return compiled(dag.build(), 8, "actor_rollout_ref.actor.strategy=megatron", TP)


def test_ranks_are_grouped_by_what_they_do_by_machine_and_by_rows():
    found = rank_groups(two_agents(), 8, 3)
    assert {kind: [group.ranks for group in groups] for kind, groups in found.items()} == {
        "alike": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "machines": [(0, 1, 2), (3, 4, 5), (6, 7)],
        "shards": [(0, 1), (2, 3), (4, 5), (6, 7)],
    }
    assert found["machines"][1].label == "machine 1: ranks 3-5"
    assert found["shards"][3].label == "ranks 6-7: shard 1"


def test_kinds_of_groups_that_tell_nothing_are_skipped():
    assert set(rank_groups(two_agents(), 8, 8)) == {"alike", "shards"}, "all on one machine"
    assert set(rank_groups(two_agents(), 8, 1)) == {"alike", "shards"}, "each rank on its own"
    assert set(rank_groups(None, 8, 2)) == {"machines"}
    assert set(rank_groups(two_agents(), 16, 8)) == {"machines"}, "the plan is of another run"


def test_ranks_are_counted_by_place_and_the_one_behind_is_first():
    ranks = [RankState(rank, 7, "train", 100.0 + rank) for rank in range(6)]
    ranks += [RankState(6, 6, "rollout", 50.0), RankState(7, 7, "rollout", 99.0)]
    found = places(ranks, {})
    assert [(place["step"], place["node"], place["ranks"], place["count"]) for place in found] == [
        (6, "rollout", "6", 1),
        (7, "rollout", "7", 1),
        (7, "train", "0-5", 6),
    ]
    assert (found[2]["first_s"], found[2]["last_s"]) == (100.0, 105.0)
    groups = [RankGroup("a", (0, 1, 2, 3)), RankGroup("b", (4, 5, 6, 7)), RankGroup("gone", (8, 9))]
    assert cells(groups, found) == [["a", [(2, 4)]], ["b", [(2, 2), (0, 1), (1, 1)]], ["gone", []]]


def trace(rank: int, late_us: float = 0.0) -> RankTrace:
    """Two instructions of step 1; the second meets."""
    args = {"step": 1, "rows": 2, "peak_gib": 1.0 + rank}
    first = Interval("rollout", 0.0, 1e6 + late_us, 0, args)
    return RankTrace(rank, "", spans={0: [first, Interval("reshard", 1e6 + late_us, 3e6, 0, args)]})


def test_a_group_is_in_an_instruction_from_its_first_rank_to_its_last():
    groups = {
        "machines": [RankGroup("machine 0: ranks 0-1", (0, 1)), RankGroup("machine 1: ranks 2-3", (2, 3))]
    }
    found = group_lanes([trace(0), trace(1, 5e5), trace(2)], groups, [1], 0.0, MEETING)["machines"]
    assert found["of"] == 2 and [lane["title"] for lane in found["lanes"]] == ["machine 0", "machine 1"]
    rollout, reshard = found["lanes"][0]["spans"]
    assert rollout[:3] == ["rollout", 0.0, 1500.0] and reshard[:3] == ["reshard", 1000.0, 2000.0]
    about = {
        "step": 1,
        "ranks": 2,
        "last rank": 1,
        "longest of a rank, ms": 1500.0,
        "rows": 4,
        "peak_gib": 2.0,
    }
    assert rollout[5] == about, "rows are added up, memory is the most"
    assert found["lanes"][1]["spans"][0][5]["ranks"] == 1, "rank 3 has left no trace"


def test_groups_that_others_wait_for_are_shown_and_others_evenly(monkeypatch):
    monkeypatch.setattr(lanes_module, "MOST_LANES", 10)
    traces = [trace(rank, 5e5 if rank == 33 else 0.0) for rank in range(100)]
    groups = {"machines": [RankGroup(str(rank), (rank,)) for rank in range(100)]}
    found = group_lanes(traces, groups, [1], 0.0, MEETING)["machines"]
    shown = [lane["rank"] for lane in found["lanes"]]
    assert found["of"] == 100 and len(shown) <= 10 and 33 in shown
    assert {0, 20, 40, 60, 80} <= set(shown)


@pytest.mark.parametrize("seed", range(60))
def test_the_critical_path_is_the_same_when_few_ranks_are_kept(seed):
    num_ranks, program = drawn(seed)
    parts = schedule(num_ranks, program)
    few, counted = ranks_of_path(parts, MEETING, most=0)
    assert counted == len({part.rank for part in parts})
    assert replay(few, MEETING) == replay(parts, MEETING)


def test_ranks_that_came_late_are_kept_beside_those_of_the_path():
    late = random.Random(0).choices(range(1, 50), k=64)
    parts = [Part(rank, "work", rank, 0.0, 10.0 + late[rank] / 100) for rank in range(64)]
    parts += [
        Part(rank, "reshard", 0, 10.0 + late[rank] / 100, 11.0 + late[rank] / 1e5) for rank in range(64)
    ]
    few, counted = ranks_of_path(parts, MEETING, most=20)
    kept = {part.rank for part in few}
    assert counted == 64 and len(few) == 20
    assert min(late[rank] for rank in kept) >= sorted(late)[-11]
