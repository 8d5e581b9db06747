"""Interactions that a program plays (actor_rollout_ref.serve): their plan, and what is refused."""

import pytest
from plan_cases import add_agent, compiled, config

from siirl.compiler.compile import compile_plan
from siirl.config import load_config
from siirl.config.effects import effect_warnings
from siirl.dag.spec import DagBuilder
from siirl.errors import ConfigError, UserError
from siirl.show.plan_text import report

COMMAND = "actor_rollout_ref.serve.command"
SERVED = {"serve": {"command": "python agent.py"}}
LISTENS = {"serve": {"listen": True}}


def served(first=None, second=None, scored=True, tail=None, credit=None):
    """An agent that a program plays; as asked for, a second one with it, and an environment below."""
    dag = DagBuilder("served")
    above = dag.node("planner", "MODEL_INFERENCE", "ROLLOUT", **{"config": SERVED} | (first or {}))
    if second is not None:
        above = dag.node(
            "worker", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[above], **second
        )
    if tail is not None:
        dag.node("game", "ENV_INTERACT", dependencies=[above], config=tail)
    for agent in (0,) if second is None else (0, 1):
        own = {"agent_group": agent, "dependencies": [above]}
        if scored:
            own["dependencies"] = [dag.node(f"reward_{agent}", "COMPUTE", "REWARD", **own)]
        advantage = dag.node(f"advantage_{agent}", "COMPUTE", "ADVANTAGE", config=credit or {}, **own)
        dag.node(f"train_{agent}", "MODEL_TRAIN", "ACTOR", agent_group=agent, dependencies=[advantage])
    return dag.build()


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("second", [None, {}])
def test_a_program_plays_the_whole_interaction_and_rewards_it_if_nobody_else_does(scored, second):
    plan = compiled(served(second=second, scored=scored), 1)
    (talk,) = plan.interactions.values()
    assert talk.entry == "planner" and plan.nodes["planner"].op == "interaction"
    assert talk.program["command"] == "python agent.py" and talk.program["needs_reward"] is not scored
    assert talk.most_turns == talk.program["max_requests"] == 64 and not talk.program["is_function"]
    assert [stage.rows for stage in talk.stages] == [True] * (1 if second is None else 2)


def test_the_plan_says_what_plays():
    dag = served(scored=False)
    plan, configs, *_ = compile_plan(dag, config(), 1)
    text = report(plan, configs)
    assert "a program plays each episode: python agent.py" in text
    assert "at most 64 requests; nobody else gives rewards" in text and "where the program says" in text
    assert "1 x the program's" in text


def test_a_key_of_the_run_serves_a_template():
    dag = DagBuilder("template")
    add_agent(dag, 0)
    plan = compiled(dag.build(), 1, f"{COMMAND}=python agent.py", "actor_rollout_ref.serve.max_requests=5")
    assert plan.interactions["rollout_0"].program["command"] == "python agent.py"
    assert plan.interactions["rollout_0"].most_turns == 5


def test_the_plan_says_where_clients_are_waited_for():
    keys = ["listen=true", "address=0.0.0.0:8100", "token_env=SECRET"]
    plan, configs, *_ = compile_plan(
        served(first={"config": {}}), config(*(f"actor_rollout_ref.serve.{key}" for key in keys)), 1
    )
    (talk,) = plan.interactions.values()
    assert talk.program["listen"] and talk.program["command"] is None and not talk.program["needs_reward"]
    text = report(plan, configs)
    assert "listens on 0.0.0.0, port 8100 + rank; they show the secret in SECRET" in text
    assert "1 x the program's" in text


REFUSED = [
    ({"first": {"config": LISTENS | {"rollout.max_lag": 1}}}, "serve.listen with rollout.max_lag=1"),
    ({"first": {"config": {"serve": {"listen": True, "command": "x"}}}}, "either siirl starts"),
    ({"first": {"config": {"serve": {"listen": True, "address": "8100"}}}}, "host:port"),
    ({"first": {"config": {"serve": {"listen": True, "address": "127.0.0.1:99999"}}}}, "host:port"),
    ({"first": {"config": {"serve": {"listen": True, "idle_s": 0}}}}, "idle_s"),
    ({"first": {"config": LISTENS}, "tail": {"env_path": "games.py:Game"}}, "is their environment"),
    ({"first": {"loop": {"max_turns": 2}}}, "loop with .*the program decides"),
    ({"first": {"agent_options": {"process_path": "x.py"}}}, "agent_options with"),
    ({"first": {"config": SERVED | {"rollout.multi_turn.enable": True}}}, "multi_turn.enable with"),
    ({"first": {"config": SERVED | {"rollout.max_lag": 1}}}, "max_lag=1"),
    ({"second": {"config": {"rollout.name": "openai"}}}, "rollout.name=openai"),
    ({"second": {"config": {"serve": {"command": "python other.py"}}}}, "at node 'planner'"),
    ({"first": {"config": {}}, "second": {"config": SERVED}}, "Set it at node 'planner'"),
    ({"credit": {"credit.group_by": ["task", "turn"]}}, "group_by=.turn"),
    ({"credit": {"credit.turn": 0}, "scored": False}, "nothing would be rewarded"),
    ({"credit": {"adv_estimator": "gae_marft"}}, "adv_estimator=gae_marft"),
    ({"tail": {"env_path": "games.py:Game"}}, "is their environment"),
    ({"first": {"config": {"serve": {"command": "missing_file.py:play"}}}}, "missing_file"),
    ({"first": {"config": {"serve": {"command": "x", "max_requests": 0}}}}, "max_requests"),
    ({"first": {"config": {"serve": {"command": "x", "deadline_s": 0}}}}, "deadline_s"),
    ({"first": {"config": {"serve": {"comand": "x"}}}}, "comand.*command"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_does_not_go_with_a_program_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        compiled(served(**options), 1)


def test_a_function_is_checked_for_what_it_is_called_with(tmp_path):
    (tmp_path / "agent.py").write_text("def play(task, model): ...\nasync def good(session): ...\n")
    wrong = {"config": {"serve": {"command": f"{tmp_path}/agent.py:play"}}}
    with pytest.raises(UserError, match="session"):
        compiled(served(first=wrong), 1)
    right = {"config": {"serve": {"command": f"{tmp_path}/agent.py:good"}}}  # a coroutine will do
    assert compiled(served(first=right), 1).interactions["planner"].program["is_function"]


def test_keys_without_a_command_are_named():
    cfg = load_config(["actor_rollout_ref.serve.max_requests=3"])
    said = "serve.max_requests=3 has no effect: actor_rollout_ref.serve.command is null and "
    assert any(said in line for line in effect_warnings(cfg))
    for played in (f"{COMMAND}=x", "actor_rollout_ref.serve.listen=true"):
        assert not effect_warnings(load_config(["actor_rollout_ref.serve.max_requests=3", played]))
    cfg = load_config([f"{COMMAND}=x", "actor_rollout_ref.serve.idle_s=3"])
    assert any("serve.idle_s=3.0 has no effect" in line for line in effect_warnings(cfg))
    with pytest.raises(ConfigError, match="tool_format"):
        load_config([f"{COMMAND}=x", "actor_rollout_ref.serve.tool_format=xml"])
