"""rollout.weight_link=spread: who sends weights to ranks without a trainer, and the groups for that."""

import pytest
from plan_cases import config

from siirl.compiler.compile import TEMPLATES, compile_plan
from siirl.compiler.plan import sender_groups
from siirl.compiler.plan_warnings import plan_warnings
from siirl.dag.spec import NodeSpec, dag_spec
from siirl.dag.yaml_file import load_dag_file

SPREAD = "actor_rollout_ref.rollout.weight_link=spread"


def planned(placements, *keys, world_size=4):
    """A plan with placements by node role, and what is warned of."""
    dag, cfg = load_dag_file(TEMPLATES / "grpo.yaml"), config(*keys)
    nodes = [NodeSpec(**{**vars(node), "placement": placements.get(node.node_role)}) for node in dag.nodes]
    plan, node_cfgs = compile_plan(dag_spec(dag.dag_id, nodes, dag.description), cfg, world_size)
    return plan, plan_warnings(cfg, plan, node_cfgs)


@pytest.mark.parametrize(
    ("sources", "receivers", "expected"),
    [
        ((0, 1), (2, 3), ((0, 2, 3), (1, 2, 3))),
        ((3,), (0, 1), ((0, 1, 3),)),
        ((0, 2), (1, 3), ((0, 1, 3), (1, 2, 3))),
    ],
)
def test_each_trainer_rank_sends_to_all_that_hold_none(sources, receivers, expected):
    assert sender_groups(sources, receivers) == expected


def test_a_plan_has_the_groups_of_the_senders_where_weights_are_spread():
    apart = {"ROLLOUT": "2-3", "ACTOR": "0-1", "REFERENCE": "0-1"}
    plain, _ = planned(apart)
    spread, warnings = planned(apart, SPREAD)
    (link,) = spread.links.values()
    assert link.kind == "spread" and [one.kind for one in plain.links.values()] == ["broadcast"]
    assert {*spread.groups} - {*plain.groups} == {(0, 2, 3), (1, 2, 3)}
    assert not [line for line in warnings if "weight_link" in line]


def test_on_the_trainers_own_ranks_there_is_nothing_to_spread():
    plan, warnings = planned({}, SPREAD)
    assert [link.kind for link in plan.links.values()] == ["local"]
    assert any("weight_link=spread has no effect: all of its ranks hold the trainer" in x for x in warnings)


@pytest.mark.parametrize(
    ("rollout", "actor", "keys", "words"),
    [
        ("1-3", "0-1", (), "some of its ranks hold the trainer"),
        ("5-5", "0-4", (), "the trainer has 5 ranks, and at most 4 send rows"),
        (
            "2-3",
            "0-1",
            ("actor_rollout_ref.actor.fsdp_config.fsdp_size=1",),
            "its 2 ranks hold several copies of the weights",
        ),
        (
            "2-3",
            "0-1",
            ("actor_rollout_ref.actor.strategy=megatron",),
            "a trainer under megatron gathers its weights",
        ),
    ],
)
def test_where_rows_are_not_sent_one_rank_sends_and_a_warning_says_why(rollout, actor, keys, words):
    places = {"ROLLOUT": rollout, "ACTOR": actor, "REFERENCE": actor}
    plan, warnings = planned(places, SPREAD, *keys, world_size=6 if "5" in rollout else 4)
    assert [link.kind for link in plan.links.values()] == ["broadcast"]
    assert [line for line in warnings if f"weight_link=spread has no effect: {words}." in line]
