"""What ranks do now: who runs, who waits for whom, who has failed, by the positions that they write."""

import dataclasses

import pytest
from plan_cases import add_agent, compiled
from viewed_runs import write_run

from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Reshard, Run
from siirl.dag.spec import DagBuilder
from siirl.observe.position import AT_END, Position, PositionFile, read_position
from siirl.observe.spans import Observer
from siirl.runs.rank_now import Doing, doing
from siirl.runs.run_state import RankState
from siirl.view.view_page import read_run


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Agents 0 and 1 on ranks 0-3 and 4-7; rows move before the training, which two ranks do together."""
    dag = DagBuilder("two")
    add_agent(dag, 0, placement="0-3")
    add_agent(dag, 1, placement="4-7")
    sizes = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    return compiled(dag.build(), 8, "actor_rollout_ref.actor.strategy=megatron", sizes)


def number(plan, wanted, section="instructions") -> int:
    """Of the Run of a node; of the last reshard on the ranks of one, before it trains."""
    if wanted in plan.nodes:
        return next(
            at for at, ins in enumerate(getattr(plan, section)) if isinstance(ins, Run) and ins.node == wanted
        )
    ranks = plan.run_of("train_0").ranks
    return max(
        at
        for at, ins in enumerate(plan.instructions)
        if isinstance(ins, Reshard) and set(ins.ranks) == set(ranks)
    )


def at(plan, rank, name, step=5, part="step", section="instructions") -> RankState:
    place = number(plan, name, section)
    return RankState(rank, step, name, 0.0, "", part, (0, place, 0, place))


def test_ranks_that_move_rows_wait_for_those_that_are_behind(plan):
    ranks = [at(plan, rank, "reshard") for rank in (0, 1)] + [at(plan, rank, "rollout_0") for rank in (2, 3)]
    ranks += [at(plan, rank, "rollout_1") for rank in (4, 5, 6, 7)]
    found = doing(plan, ranks)
    assert found[0] == found[1] == Doing("waits", "train_0", (2, 3))
    assert found[2] == Doing("runs", "rollout_0") and found[4] == Doing("runs", "rollout_1")
    late = [dataclasses.replace(rank, step=4) if rank.rank == 3 else rank for rank in ranks]
    assert doing(plan, late)[0].behind == (2, 3), "a step behind is behind, too"
    there = [at(plan, rank, "reshard") for rank in range(4)]
    assert {one.state for one in doing(plan, there).values()} == {"runs"}, "all have come"


def test_what_each_rank_does_for_itself_waits_for_nobody(plan):
    found = doing(plan, [at(plan, 0, "reward_0"), at(plan, 1, "rollout_0")])
    assert found == {0: Doing("runs", "reward_0"), 1: Doing("runs", "rollout_0")}


def test_a_model_that_is_split_begins_when_all_of_its_ranks_have_come(plan):
    ranks = [at(plan, rank, "train_0") for rank in (0, 1, 2)] + [at(plan, 3, "reshard")]
    found = doing(plan, ranks)
    assert found[0] == Doing("waits", "train_0", (3,)) and found[3] == Doing("runs", "train_0")


def ended(rank, step=5, part="step", order=(1,)) -> RankState:
    return RankState(rank, step, f"end of {part}", 0.0, "", AT_END, order)


def test_a_rank_that_has_done_its_part_is_idle_until_the_others_have(plan):
    found = doing(plan, [ended(0), ended(1), at(plan, 2, "rollout_0"), at(plan, 3, "train_0")])
    assert found[0] == found[1] == Doing("idle", "", (2, 3)) and found[2].state == "runs"
    assert found[0].text() == "idle until 2-3 are done" and found[3].text() == "waits for 2"
    assert doing(plan, [ended(0), ended(1)])[0] == Doing("idle"), "all have: nobody is waited for"
    assert doing(None, [ended(0)])[0].text() == "idle"


def test_a_rank_without_a_part_in_a_validation_is_idle_while_others_validate(plan):
    """It is through with all batches at once: its order is the larger."""
    busy = at(plan, 1, "rollout_0", part="validation", section="validation")
    assert doing(plan, [ended(0, part="validation", order=(6,)), busy])[0] == Doing("idle", "", (1,))


def test_a_rank_that_left_an_error_has_failed_where_it_was(plan):
    ranks = [at(plan, 0, "reshard"), dataclasses.replace(at(plan, 3, "rollout_0"), error="OutOfMemoryError")]
    found = doing(plan, ranks)
    assert found[3] == Doing("failed", "rollout_0") and found[0].behind == (3,)


def test_a_report_waits_for_all_and_a_validation_has_places_of_its_own(plan):
    report = RankState(0, 5, "report", 0.0, "", "report", (2,))
    behind = at(plan, 1, "rollout_0", part="validation", section="validation")
    found = doing(plan, [report, behind])
    assert found == {0: Doing("waits", "report", (1,)), 1: Doing("runs", "rollout_0")}


def test_nobody_waits_in_a_run_that_did_not_record_the_order(plan):
    ranks = [RankState(0, 5, "reshard", 0.0), RankState(1, 4, "rollout_0", 0.0)]
    assert doing(plan, ranks) == {0: Doing("runs", "reshard"), 1: Doing("runs", "rollout_0")}
    assert doing(None, [at(plan, 0, "rollout_0")]) == {0: Doing("runs", "rollout_0")}


def test_a_position_has_the_part_of_the_step_and_the_place_in_it(tmp_path):
    path = tmp_path / "rank_0"
    observer = Observer(PositionFile(path))
    with observer.part("step", 3), observer.span("rollout", 3, (1, 0, 1)):
        assert (found := read_position(path)) is not None
        assert (found.step, found.node, found.part, found.order) == (3, "rollout", "step", (0, 1, 0, 1))
    assert (found := read_position(path)) is not None
    assert (found.step, found.node, found.part, found.order) == (3, "end of step", AT_END, (1,))
    with observer.span("report", 3):
        assert (found := read_position(path)) is not None
        assert (found.node, found.part, found.order) == ("report", "report", (2,))
    with pytest.raises(RuntimeError), observer.part("checkpoint", 3):
        raise RuntimeError
    assert (found := read_position(path)) is not None and found.node == "end of report", "it did not end"
    with observer.part("step", 4), observer.span("a" * 500, 4, (10**6, 10**6, 10**6)):
        assert (found := read_position(path)) is not None and found.order == (0, 10**6, 10**6, 10**6)
    observer.close()
    path.write_text("3\trollout\t12.5")
    assert read_position(path) == Position(3, "rollout", 12.5), "written by an earlier version"
    path.write_text("3\trollout\t12.5\tstep 0 x")
    assert read_position(path) is None


def test_the_page_says_who_waits_for_whom(tmp_path):
    folder = write_run(tmp_path / "run")
    job_plan = read_run(folder)["dag"]
    train = next(node["name"] for node in job_plan["nodes"] if "train" in node["op"])
    for rank, order in ((0, (0, 99)), (1, (0, 98))):
        file = PositionFile(folder / "status" / f"rank_{rank}")
        file.set(6, "report" if rank == 0 else train, "report" if rank == 0 else "step", order)
        file.close()
    places = read_run(folder)["overview"]["places"]
    assert {(place["node"], place["state"], place["behind"]) for place in places} == {
        (train, "runs", ""),
        ("report", "waits", "1"),
    }
