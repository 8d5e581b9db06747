"""What the plan says of rewards that are shared, rows of shared policies, tools and turns of training."""

import re

import pytest
from plan_cases import add_agent, config

from siirl.compiler.compile import compile_plan
from siirl.dag.spec import DagBuilder
from siirl.show.plan_picture import draw
from siirl.show.plan_text import report

ACTOR = "actor_rollout_ref.actor"
MINI = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.recompute_old_log_prob=False")
SIZES = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", *MINI)
CODE = """
def who(episode):
    return "digger"

class Field:
    def reset(self, task, seed): ...
    def step(self, actions): ...
"""
SHARES = {"agent_group": 2, "config": {"rollout.agent.share_instance": 1}}


def hunt(folder, planner_credit=None, workers_credit=None, reads=("agent_1.score",)) -> DagBuilder:
    """A planner (agent 0) sends a scout with tools (agent 1) or a digger (2, with its policy) to a field."""
    (folder / "flow.py").write_text(CODE)
    (folder / "tools.yaml").write_text("tools: [{builtin: calculator}]")
    tools = {"enable": True, "tool_config_path": str(folder / "tools.yaml"), "max_assistant_turns": 2}
    dag = DagBuilder("hunt")
    route = {"route": f"{folder / 'flow.py'}:who"}
    dag.node("planner", "MODEL_INFERENCE", "ROLLOUT", agent_options=route)
    config = {f"rollout.multi_turn.{key}": value for key, value in tools.items()}
    dag.node("scout", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=["planner"], config=config)
    dag.node("digger", "MODEL_INFERENCE", "ROLLOUT", dependencies=["planner"], **SHARES)
    field = {"config": {"env_path": f"{folder / 'flow.py'}:Field"}, "loop": {"max_turns": 3}}
    dag.node("field", "ENV_INTERACT", dependencies=["scout", "digger"], **field)
    for agent in (0, 1):
        dag.node(f"reward_{agent}", "COMPUTE", "REWARD", agent_group=agent, dependencies=["field"])
    for agent, credit in ((0, planner_credit), (1, workers_credit)):
        common = {"agent_group": agent, "dependencies": ["reward_0", "reward_1"], "config": credit or {}}
        dag.node(f"credit_{agent}", "COMPUTE", "ADVANTAGE", reads=None if agent else list(reads), **common)
        dag.node(
            f"train_{agent}", "MODEL_TRAIN", "ACTOR", agent_group=agent, dependencies=[f"credit_{agent}"]
        )
    return dag


def lines_of(dag: DagBuilder, world_size=1, *overrides) -> list[str]:
    plan, configs = compile_plan(dag.build(), config(*SIZES, *overrides), world_size)
    return [" ".join(line.split()) for line in report(plan, configs).splitlines()]


TEAM = {
    "credit.own": 0.5,
    "credit.team": 0.25,
    "credit.group_by": ["task", "turn"],
    "credit.equal_weight": "row",
}


def test_the_plan_says_whose_rewards_count_for_whom_and_what_is_compared(tmp_path):
    lines = lines_of(hunt(tmp_path, TEAM))
    place = lines.index("credit")
    assert lines[place + 1 : place + 4] == [
        "node estimator reward compared by besides",
        "credit_0 grpo 0.5 x own score + 0.25 x mean score of the others (of agents 0, 1, 2) + "
        "1 x the environment's task, turn turn_gamma 1, equal weight of each row",
        "credit_1 grpo 1 x own score + 1 x the environment's task",
    ]
    text = "\n".join(lines_of(hunt(tmp_path, TEAM, {"credit.team": 2.0})))
    assert "credit_1 grpo 1 x own score + 2 x mean score of the others (of agents 1, 2) + 1 x" in text
    alone = DagBuilder("alone")
    add_agent(alone)
    assert "credit" not in lines_of(alone)


def test_the_plan_bounds_the_rows_of_a_policy_and_says_who_trains_when(tmp_path):
    lines = lines_of(hunt(tmp_path, TEAM), 1, "actor_rollout_ref.rollout.agent.train_cycle=2")
    for expected in (
        "agent 1: 4 prompts x 4 responses = 16 episodes a step, played by 1 shard of 4 prompts",
        "a row for each episode in which it speaks: at most 16, more where a context is full or rewritten",
        "a row for each of agents 1, 2 that speaks in an episode: at most 32, more where a context is full "
        "or rewritten",
        "2 mini-batches of 2 prompts = up to 16 rows -> 2 optimizer steps",
        "a mini-batch is up to 8 rows on each of 1 data-parallel rank",
        "train_0, train_1 train by turns of 2 steps (rollout.agent.train_cycle)",
        "2 scout agent 1 agent_1.rollout tools.yaml, 2 turns field",
    ):
        assert expected in lines, "\n".join(lines)
    alone = DagBuilder("alone")
    add_agent(alone)
    assert "2 mini-batches of 2 prompts = 8 sequences -> 2 optimizer steps" in lines_of(alone)


def test_an_episode_takes_one_way_of_a_route(tmp_path):
    assert "an episode has at most 9 turns" in lines_of(hunt(tmp_path, TEAM))  # 3 x (planner, scout twice)


@pytest.mark.parametrize(("back_to", "turns"), [("rollout_0", 9), ("rollout_1", 7), ("rollout_2", 5)])
def test_what_a_loop_leaves_out_is_not_counted(back_to, turns):
    dag = DagBuilder("chain")
    for agent in range(3):
        above = [f"rollout_{agent - 1}"] if agent else []
        loop = {"loop": {"to": back_to, "max_turns": 3}} if agent == 2 else {}
        add_agent(dag, agent, dependencies=above, **loop)
    assert f"an episode has at most {turns} turns" in lines_of(dag)


def test_the_picture_says_which_way_a_route_goes_and_what_is_in_the_tables(tmp_path):
    cfg = config(*SIZES, "actor_rollout_ref.rollout.agent.train_cycle=1")
    plan, configs = compile_plan(hunt(tmp_path, TEAM).build(), cfg, 1)
    draw(plan, tmp_path / "hunt.svg", configs)
    text = (tmp_path / "hunt.svg").read_text()
    assert text.count(">who:<") == 2 and text.count(">scout<") == text.count(">digger<") == 2
    words = " ".join(re.findall(">([^<>]+)</text>", text))  # a box has several lines
    for expected in ("own 0.5, team 0.25, by task, turn", "; tools.yaml", "; turns of 1 step"):
        assert expected in words, expected
