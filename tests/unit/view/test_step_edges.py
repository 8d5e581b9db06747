"""Rows and bytes on the edges of a plan, of a traced step and of any other."""

from plan_cases import add_agent, config, template_plan
from viewed_runs import write_run

from siirl.compiler.compile import compile_plan
from siirl.dag.spec import DagBuilder
from siirl.observe.columns import moved_metric, rows_metric
from siirl.view.dag_share import LOADED, last_edges, plan_edges, step_edges
from siirl.view.view_page import read_run

ROUTE = "agent_0.samples/0 -> agent_0.samples/1"


def test_an_edge_is_from_who_wrote_a_field_to_who_reads_it_by_the_reshards_between():
    plan = template_plan(2, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert plan_edges(plan) == {
        (LOADED, "rollout_actor"): set(),
        ("rollout_actor", "function_reward"): set(),
        ("rollout_actor", "calculate_advantages"): set(),
        ("function_reward", "calculate_advantages"): set(),
        ("rollout_actor", "actor_old_log_prob"): {ROUTE},
        ("rollout_actor", "actor_train"): {ROUTE},
        ("actor_old_log_prob", "actor_train"): set(),
        ("calculate_advantages", "actor_train"): {ROUTE},
    }


def test_rows_that_several_ranks_hold_count_once_and_bytes_of_all_ranks_add_up():
    megatron = ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]
    plan = template_plan(2, "actor_rollout_ref.actor.strategy=megatron", *megatron)
    spans = [(rank, "reshard", {"route": ROUTE, "bytes": 100 + rank}) for rank in (0, 1)] * 2
    spans += [(rank, name, {"rows": 16}) for rank in (0, 1) for name in ("actor_train", "function_reward")]
    found = {tuple(edge["names"]): (edge["rows"], edge["bytes"]) for edge in step_edges(plan, spans)}
    assert found["rollout_actor", "actor_train"] == (16, 402), "both ranks of the actor hold the same rows"
    assert found["rollout_actor", "function_reward"] == (32, 0), "each rank has rows of its own"
    assert found[LOADED, "rollout_actor"] == (None, 0)


def test_edges_of_an_untraced_run_are_those_of_its_last_step_with_rows():
    plan = template_plan(2, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    moved = moved_metric(ROUTE)
    assert "/" not in moved.removeprefix("reshard/") and ">" not in moved, "loggers take it as a name"
    series = {rows_metric("actor_train"): {1: 8.0, 3: 32.0}, rows_metric("function_reward"): {3: 32.0}}
    series |= {moved: {3: 2048.0, 4: 1.0}, "time/step_s": {4: 1.0}}
    found, step = last_edges(plan, series)
    numbers = {tuple(edge["names"]): (edge["rows"], edge["bytes"]) for edge in found}
    assert step == 3 and numbers["rollout_actor", "actor_train"] == (32, 2048)
    assert numbers["rollout_actor", "function_reward"] == (32, 0)
    assert numbers[LOADED, "rollout_actor"] == (None, 0), "its rows are not on record"
    assert last_edges(plan, {"time/step_s": {4: 1.0}}) == ([], None)


def test_arrows_between_agents_have_the_turns_that_the_reader_took():
    dag = DagBuilder("pair")
    above = add_agent(dag, 0)["rollout"]
    add_agent(dag, 1, dependencies=[above])
    plan, _ = compile_plan(dag.build(), config(), 2)
    series = {rows_metric("rollout_0"): {7: 16.0}, "agent_0/interaction/episodes": {6: 1.0, 7: 16.0}}
    series |= {"agent_0/interaction/failed": {7: 0.25}, "agent_0/interaction/rollout_1/turns": {7: 1.5}}
    found = [edge for edge in last_edges(plan, series)[0] if "turns" in edge]
    assert [(edge["names"], edge["turns"], edge["rows"]) for edge in found] == [
        (["rollout_0", "rollout_1"], 18, None)
    ]
    del series["agent_0/interaction/failed"]
    assert not [edge for edge in last_edges(plan, series)[0] if "turns" in edge]


def test_the_page_has_what_bounds_each_traced_step_and_its_edges(tmp_path):
    shown = read_run(write_run(tmp_path / "run"))["timeline"]
    assert [bound["step"] for bound in shown["bounds"]] == [4, 5, 6] and set(shown["edges"]) == {
        "4",
        "5",
        "6",
    }
    last = shown["bounds"][-1]
    assert last["total_ms"] == shown["steps"][-1]["end"] - shown["steps"][-1]["start"]
    assert last["text"].startswith(last["faster"][0]["name"]) and "twice as fast" in last["text"]
    assert {edge["rows"] for edge in shown["edges"]["6"]} == {32}
