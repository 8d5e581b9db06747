"""Where episodes branch: what check refuses, and the number of episodes that a plan reckons with."""

import pytest
from plan_cases import compiled

from siirl.compiler.compile import TEMPLATES
from siirl.compiler.plan import Branches
from siirl.dag.node_config import with_node_config
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import UserError

GAMES = "examples.multi_agent.games"
BEST = {"rollout.agent.branch": {"candidates": 4, "visits": [], "go_on": "best"}}
BY_TURN = {"credit.group_by": ["task", "turn", "branch"], "credit.turn_gamma": 0}


def tree(*overrides: str, **nodes: dict):
    """The plan of the template with changed nodes."""
    nodes = {"world": {"env_path": f"{GAMES}:Luck"}} | nodes
    return compiled(with_node_config(load_dag_file(TEMPLATES / "tree.yaml"), nodes), 1, *overrides)


def test_the_episodes_of_a_sample_are_counted():
    (talk,) = tree().interactions.values()
    assert talk.speaking[0].branches == Branches(4, (1,), "all") and talk.most_branches == 4
    twice = {"rollout.agent.branch.visits": [0, 2]}
    assert next(iter(tree(player=twice).interactions.values())).most_branches == 16
    best = tree(player=BEST, advantage_player=BY_TURN)
    assert next(iter(best.interactions.values())).most_branches == 1 + 8 * 3  # of 8 turns, three others each


@pytest.mark.parametrize(
    "nodes, overrides, words",
    [
        ({"world": {"env_path": f"{GAMES}:Doors"}}, (), ["Doors", "replayable = True"]),
        ({"world": {"env_path": "openenv:http://localhost:1"}}, (), ["openenv", "replayable"]),
        ({"player": BEST}, (), ["go_on=best", "turn_gamma=0"]),
        ({"player": {"rollout.agent.branch.visits": []}}, (), ["each way branches again", "visits"]),
        (
            {
                "player": BEST,
                "advantage_player": BY_TURN,
                "world": {"env_path": f"{GAMES}:Luck", "rewards_with_env": False},
            },
            (),
            ["go_on=best", "no"],
        ),
        ({}, ("actor_rollout_ref.rollout.max_lag=1",), ["max_lag=1", "not supported yet"]),
        ({"advantage_player": {"credit.group_by": ["task", "branch"]}}, (), ["turns branch, not rows"]),
        ({"player": {"rollout.agent.branch.candidates": 1}}, (), ["no episode of it branches"]),
        ({}, ("actor_rollout_ref.serve.command=python agent.py",), ["a program plays"]),
    ],
)
def test_what_cannot_branch_is_refused_with_the_reason(nodes, overrides, words):
    with pytest.raises(UserError) as refused:
        tree(*overrides, **nodes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_single_turn_and_turns_at_once_do_not_branch():
    branch = {"rollout.agent.branch.candidates": 2, "rollout.agent.branch.visits": [0]}
    with pytest.raises(UserError, match=r"it is in no interaction.*Set rollout\.n"):
        grpo = with_node_config(load_dag_file(TEMPLATES / "grpo.yaml"), {"rollout_actor": branch})
        compiled(grpo, 1)
    debate = with_node_config(load_dag_file(TEMPLATES / "debate_rounds.yaml"), {"debater_0": branch})
    with pytest.raises(UserError, match="speaks at once with debater_1"):
        compiled(debate, 1)
