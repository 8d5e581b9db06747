"""What check and plan say of a workflow that runs, but perhaps not as it was meant."""

import re

import pytest
from plan_cases import add_agent, config

from siirl.compiler.compile import compile_plan
from siirl.compiler.plan_warnings import plan_notes, plan_warnings
from siirl.dag.spec import DagBuilder

TOOLS = "rollout.multi_turn.tool_config_path"
PLAIN = "algorithm.adv_estimator=reinforce_plus_plus"
GROUPS = {"credit.group_by": ["task", "agent"]}


def pair(second: dict | None = None, credit: dict | None = None, **rollout) -> DagBuilder:
    """Two agents that talk; the second has a rollout only, or these nodes: name -> its dependencies."""
    dag = DagBuilder("pair")
    first = add_agent(dag, 0)["rollout"]
    above = dag.node("second", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[first], **rollout)
    if second is not None:
        options = {"agent_group": 1, "dependencies": [above, "reward_0"], "config": credit or {}}
        dag.node("credit", "COMPUTE", "ADVANTAGE", **options)
        dag.node("train", "MODEL_TRAIN", "ACTOR", agent_group=1, dependencies=["credit"])
    return dag


def service() -> dict:
    url = {"rollout.agent.endpoint.url": "http://localhost:1/v1/chat/completions"}
    return {"rollout.name": "openai"} | url


NOTES = {
    "frozen": (pair(), "agent 1 (second) speaks and is not trained: it is frozen. .*share_instance (0)"),
    "shares": (pair(config={"rollout.agent.share_instance": 0}), ""),
    "service": (pair(config=service()), ""),
    "no reward": (
        pair({}),
        "agent 1 (second) has no reward node of its own.*the scores of agent 0",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_notes_say_whose_reward_an_agent_gets_and_who_is_never_trained(name):
    dag, note = NOTES[name]
    found = plan_notes(compile_plan(dag.build(), config(), 1)[0])
    assert len(found) == bool(note)
    for part in note.split(".*") if note else ():
        assert part in found[0]


WARNINGS = [
    (pair(config={TOOLS: "tools.yaml"}), (), [f"node 'second': actor_rollout_ref.{TOOLS}=tools.yaml has no "
     "effect: actor_rollout_ref.rollout.multi_turn.enable is false."]),
    (pair({}, GROUPS), (PLAIN,), ["node 'credit': algorithm.credit.group_by=[task,agent] has "
     "no effect: algorithm.adv_estimator is reinforce_plus_plus."]),
    (pair({}, GROUPS), (), []),
    (pair(config={"rollout.temperature": 0.5}), (), []),
]  # fmt: skip


@pytest.mark.parametrize(("dag", "overrides", "expected"), WARNINGS)
def test_a_key_of_a_node_without_effect_is_named_once_with_its_node(dag, overrides, expected):
    cfg = config(*overrides)
    plan, configs = compile_plan(dag.build(), cfg, 1)
    assert [line for line in plan_warnings(cfg, plan, configs) if "has no effect" in line] == expected


GIVEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(message["reward"] for message in extra_info["conversation"])
"""
NOBODY = "node 'reward_0': compute_score of .* returns what .* gave .*, which is always 0: "


def world(rewards: bool) -> DagBuilder:
    """An agent in an environment, and a reward node."""
    dag = DagBuilder("world")
    dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    env = {"env_path": "examples.multi_agent.games:Nim", "rewards_with_env": rewards}
    dag.node("game", "ENV_INTERACT", dependencies=["rollout"], config=env, loop={"max_turns": 3})
    dag.node("reward_0", "COMPUTE", "REWARD", dependencies=["game"])
    dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=["reward_0"])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=["advantage"])
    return dag


@pytest.mark.parametrize(
    ("dag", "body", "expected"),
    [
        (world(True), GIVEN, "it counts twice. Return what"),
        (world(False), GIVEN, f"{NOBODY}rewards_with_env=false of 'game'. Set rewards_with_env=true, "),
        (pair(), GIVEN, f"{NOBODY}the conversation has no environment. Return a score"),
        (world(False), GIVEN.replace('"reward"', '"turn"'), None),
    ],
    ids=["counted twice", "not counted", "no environment", "another key"],
)
def test_a_reward_function_that_returns_what_the_environment_gave_is_warned_of(dag, body, expected, tmp_path):
    (tmp_path / "reward.py").write_text(body)
    cfg = config(f"custom_reward_function.path={tmp_path / 'reward.py'}")
    plan, configs = compile_plan(dag.build(), cfg, 1)
    found = [line for line in plan_warnings(cfg, plan, configs) if "environment gave" in line]
    assert len(found) == (expected is not None)
    assert not found or re.search(expected, found[0]), found
