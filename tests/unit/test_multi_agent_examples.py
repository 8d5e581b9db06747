"""What the examples of several agents are made of: rules of their games, their tool, their reward."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from siirl.agents.environments import load_environment
from siirl.agents.episode import Episode
from siirl.agents.tool_use import tool_use
from siirl.agents.tools import run_tools
from siirl.config.rollout import MultiTurnConfig

FOLDER = Path(__file__).parents[2] / "examples" / "multi_agent"


def play(name, truth, *moves):
    """What each move gives: (rewards, done)."""

    async def game():
        env = load_environment(f"{FOLDER / 'games.py'}:{name}", "test")()
        await env.reset({"ground_truth": truth}, 0, 5)
        results = [await env.step(actions, 5) for actions in moves]
        await env.close()
        return [(result.rewards, result.done, result.info) for result in results]

    return asyncio.run(game())


def test_the_door_that_only_the_reasoner_sees_must_be_named_by_the_actor():
    assert play("Doors", "2", {0: "door", 1: "2 open"}) == [({0: 1, 1: 1}, True, {"won": 1})]
    assert play("Doors", "2", {0: "2", 1: ""}) == [({0: 0, 1: 0}, True, {"won": 0})]


def test_who_takes_the_last_wins_and_who_cheats_loses():
    first, second, last = play("Nim", "4", {0: "1"}, {1: "2"}, {0: "1"})
    assert first == (0.0, False, {"right": 1.0}) and second == (0.0, False, {})  # 3 is lost for who faces it
    assert last == ({0: 1.0, 1: -1.0}, True, {"right": 1.0})
    for said in ("3", "", "one", "2"):
        assert play("Nim", "1", {0: said}) == [({0: -1.0}, True, {"right": 0.0, "illegal": 1.0})]


def test_the_worker_calls_the_tool_on_the_numbers_of_its_task(monkeypatch):
    monkeypatch.chdir(FOLDER)
    use = tool_use(
        MultiTurnConfig(
            enable=True,
            tool_config_path="tools.yaml",
            format="tools.py:first_word_is_a_call",
            max_parallel_calls=3,
        )
    )
    episode = Episode(0, 0, 0, 0, {"extra_info": {"numbers": [7, 3]}})
    said = ("call times", "call found", "call", "times call")
    calls = [call for text in said for call in use.parse(text).calls]
    answers = asyncio.run(run_tools(calls, use.toolbox, episode, use.limits))
    assert answers[0].text == "21" and [answer.error for answer in answers] == [
        None,
        "arguments",
        "malformed",
    ]


@pytest.mark.parametrize("answers, score", [([], 0.0), (["Error: no"], 0.1), (["20"], 0.2), (["21"], 1.2)])
def test_the_reward_is_that_of_the_team(answers, score):
    spec = importlib.util.spec_from_file_location("multi_agent_reward", FOLDER / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    conversation = [{"role": "tool", "content": text, "agent": None, "reward": 0} for text in answers]
    given = module.compute_score("planner_worker", "", "21", {"conversation": conversation, "agent": 0})
    assert given["score"] == pytest.approx(score)
    turns = [{"role": "assistant", "agent": agent, "reward": agent - 0.5, "content": ""} for agent in (0, 1)]
    assert module.compute_score("self_play", "", "4", {"conversation": turns, "agent": 1})["score"] == 0.5
    pile = {"role": "user", "agent": None, "content": "pile 4"}
    moves = [{"agent": 0, "content": "1"}, {"agent": 0, "content": "2 1"}, {"agent": 0, "content": ""}]
    assert [module.right_moves([pile, move]) for move in moves] == [1.0, 0.0, 0.0]
