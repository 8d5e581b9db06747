"""Opponent pools: what check refuses, and what a plan says of one."""

import dataclasses

import pytest
from plan_cases import add_agent, compiled, config

from siirl.compiler.compile import TEMPLATES
from siirl.compiler.plan import Plan, PoolPlan
from siirl.config.effects import why_no_effect
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagBuilder
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import UserError
from siirl.show.plan_text import pool_line

GAME = {"env_path": "examples.multi_agent.games:RockPaperScissors"}
POOL = "rollout.agent.pool"


def league(*overrides: str, world_size: int = 1, **nodes: dict) -> Plan:
    """The plan of the template with changed nodes."""
    dag = with_node_config(load_dag_file(TEMPLATES / "league.yaml"), {"game": GAME} | nodes)
    return compiled(dag, world_size, *overrides)


def test_the_opponent_has_its_weights_from_the_trainer_of_the_policy_and_no_trainer_of_its_own():
    plan = league(world_size=2)
    link = plan.links["agent_1.weights"]
    assert (link.source, link.target) == ("agent_0.actor", "agent_1.rollout")
    assert link.pool == PoolPlan(1, 0, 32, 10, None, "pfsp", 2.0, 0.0)
    assert "agent_1.actor" not in plan.models and plan.links["agent_0.weights"].pool is None
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_says_which_versions_play_and_are_kept():
    pool = league().links["agent_1.weights"].pool
    assert pool_line(pool) == "each step a version, drawn by pfsp, of 32 at most, kept after every 10 steps"
    both = dataclasses.replace(pool, win_rate=0.7, current=0.5, sampling="uniform")
    assert pool_line(both).endswith(
        "drawn by uniform, with probability 0.5 of now, of 32 at most, kept after every 10 steps and at a "
        "win rate of 0.7"
    )
    assert pool_line(dataclasses.replace(pool, every_steps=0)).endswith("kept once, before the first step")


@pytest.mark.parametrize(
    "nodes, overrides, words",
    [
        ({"opponent": {f"{POOL}.policy": 2}}, (), ["no node trains the policy of agent 2", "training: 0"]),
        ({"opponent": {f"{POOL}.policy": 1}}, (), ["no node trains the policy of agent 1"]),
        ({"player": {f"{POOL}.policy": 0}}, (), ["'train_player' trains this agent"]),
        ({"opponent": {"rollout.agent.share_instance": 0}}, (), ["share_instance=0", "pool.current"]),
        ({"opponent": {"rollout.name": "openai"}}, (), ["rollout.name=openai", "takes no weights"]),
        ({"opponent": {"model.lora_rank": 4}}, (), ["model.lora_rank=4, which is 0 at", "train_player"]),
        ({"opponent": {"rollout.weight_link": "checkpoint"}}, (), ["weight_link=checkpoint"]),
        ({}, ("actor_rollout_ref.rollout.max_lag=1",), ["max_lag", "change its opponent"]),
        ({}, ("actor_rollout_ref.actor.strategy=megatron",), ["strategy=megatron", "only fsdp"]),
        ({}, ("actor_rollout_ref.serve.command=python agent.py",), ["a program plays the episodes"]),
        (
            {"opponent": {f"{POOL}.sampling": "pfsp"}, "game": GAME | {"rewards_with_env": False}},
            (),
            ["pool.sampling=pfsp", "who wins is told by the rewards"],
        ),
        (
            {"opponent": {f"{POOL}.win_rate": 0.6}, "game": GAME | {"rewards_with_env": False}},
            (),
            ["pool.win_rate=0.6", "who wins"],
        ),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_the_reason(nodes, overrides, words):
    with pytest.raises(UserError) as refused:
        league(*overrides, **nodes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_all_that_draw_count_and_keep_are_on_the_same_ranks():
    dag = load_dag_file(TEMPLATES / "league.yaml")
    nodes = [
        dataclasses.replace(node, placement="1" if node.node_id == "opponent" else "0")
        if node.node_role in ("ROLLOUT", "ACTOR")
        else node
        for node in dag.nodes
    ]
    apart = with_node_config(dataclasses.replace(dag, nodes=nodes), {"game": GAME})
    with pytest.raises(UserError, match=r"not supported yet.*'opponent'.*the same placement"):
        compiled(apart, 2)


def test_an_opponent_whose_policy_is_in_no_game_with_it_is_refused():
    dag = load_dag_file(TEMPLATES / "league.yaml")
    elsewhere = DagBuilder("other")
    add_agent(elsewhere, 2)
    nodes = (*dag.nodes, *elsewhere.build().nodes)
    other = with_node_config(
        dataclasses.replace(dag, nodes=nodes), {"game": GAME, "opponent": {f"{POOL}.policy": 2}}
    )
    with pytest.raises(UserError, match=r"'opponent'.*agent 2 is not in the same interaction"):
        compiled(other, 1)


def test_the_keys_of_a_pool_of_agent_0_have_an_effect_and_without_a_policy_none():
    chosen = config(
        "actor_rollout_ref.rollout.agent.pool.policy=0", "actor_rollout_ref.rollout.agent.pool.size=3"
    )
    assert not why_no_effect(chosen, "actor_rollout_ref.rollout.agent.pool.size")
    without = config("actor_rollout_ref.rollout.agent.pool.size=3")
    assert "pool.policy is null" in why_no_effect(without, "actor_rollout_ref.rollout.agent.pool.size")
