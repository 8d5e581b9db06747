"""What the examples of several agents are made of: games, a tool, what agents see, rewards."""

import asyncio
import importlib
import random
from pathlib import Path

import pytest

from siirl.agents.environments import load_environment
from siirl.agents.episode import Episode
from siirl.agents.tool_files import tool_use
from siirl.agents.tools import run_tools
from siirl.config.rollout import MultiTurnConfig

FOLDER = Path(__file__).parents[3] / "examples" / "multi_agent"


def load(name):
    return importlib.import_module(f"examples.multi_agent.{name}")


def play(name, truth, *moves):
    """What the game shows at first, and after each move: (observations, rewards, done, info)."""

    async def game():
        env = load_environment(f"{FOLDER / 'games.py'}:{name}", "test")()
        first = await env.reset({"ground_truth": truth}, 0, 5)
        results = [await env.step(actions, 5) for actions in moves]
        await env.close()
        return first.texts, [(r.observations, r.rewards, r.done, r.info) for r in results]

    return asyncio.run(game())


def test_the_doors_that_only_the_reasoner_sees_must_be_named_by_the_actor():
    shown, (first, second) = play("Doors", "2 0", {0: "2", 1: "2"}, {0: "door", 1: "0 2"})
    assert shown == {0: "door 2"}
    assert first[:3] == ({0: "door 0"}, {0: 0.25, 1: 0.5}, False)
    assert second[:3] == ("", {0: 0.0, 1: 0.5}, True)


@pytest.mark.parametrize("said, given", [("2", 0.25), ("door", 0.0), ("", 0.0)])
def test_a_wrong_door_ends_the_game(said, given):
    _, ((_, rewards, done, _),) = play("Doors", "2 0", {0: said, 1: "0"})
    assert done and rewards == {0: given, 1: 0.0}


def test_who_takes_the_last_wins_and_who_cheats_loses():
    _, (first, second, last) = play("Nim", "4", {0: "1"}, {1: "2"}, {0: "1"})
    assert first[1:] == (0.0, False, {"right": 1.0})
    assert second[1:] == (0.0, False, {})  # 3 is lost for who faces it
    assert last[1:] == ({0: 1.0, 1: -1.0}, True, {"right": 1.0})
    for said in ("3", "", "one", "2"):
        _, (only,) = play("Nim", "1", {0: said})
        assert only[1:] == ({0: -1.0}, True, {"right": 0.0, "illegal": 1.0})


def outcomes(opponent: str, side: int, pile: int, seed: int) -> set[float]:
    """The policy's rewards over all games of legal moves that it can play against a scripted opponent."""
    found, unfinished = set(), [()]
    while unfinished:
        moves = unfinished.pop()
        game = load("games").Nim()
        game.reset({"ground_truth": str(pile), "extra_info": {"opponent": opponent, "side": side}}, seed)
        player, own, result = 0, iter(moves), None
        while result is None or not result.done:
            said = next(own, None) if player == side else "unheard"
            if said is None:
                unfinished += [(*moves, str(move)) for move in (1, 2) if move <= game.pile]
                break
            result = game.step({player: said})
            player = 1 - player
        else:
            assert "illegal" not in result.info
            found.add(result.rewards[side])
    return found


def test_a_perfect_opponent_never_loses_a_game_that_it_can_win():
    for pile in range(1, 13):
        for side in (0, 1):
            lost = (side == 0) == (pile % 3 == 0)  # for the policy, if nobody errs
            assert (outcomes("perfect", side, pile, seed=0) == {-1.0}) == lost, (pile, side)
            assert 1.0 in set().union(*(outcomes("random", side, pile + 3, seed) for seed in range(20)))


def test_the_validation_of_self_play_counts_games_against_scripted_opponents():
    _, test = load("prepare").TASKS["self_play"].draw(random.Random(0), 10)
    extras = {task["data_source"]: task["extra_info"] for task in test}
    assert extras["second_against_perfect"]["side"] == 1 and len(extras) == 5
    for task in test:
        if "opponent" in task["extra_info"]:
            side, pile = task["extra_info"]["side"], int(task["reward_model"]["ground_truth"])
            assert 1.0 in outcomes("perfect", side, pile, seed=0), "the policy's side can win"
    turns = [{"agent": agent, "reward": 1 - 2 * agent, "content": "1"} for agent in (0, 1)]
    for agent, side, won in ((0, 0, 1.0), (1, 1, 0.0), (0, 1, None)):
        info = {"conversation": turns, "agent": agent, "opponent": "perfect", "side": side}
        given = load("reward").compute_score("first_against_perfect", "", "4", info)
        assert given.get("won") == won and given["score"] == 0.0, "the game rewards them"


def test_a_word_wins_against_one_other_and_one_that_is_none_loses():
    def earned(*said, opponent=None):
        game = load("games").RockPaperScissors()
        game.reset({"extra_info": {"opponent": opponent}}, 0)
        step = game.step(dict(enumerate(said)))
        assert step.done
        return step.rewards[0], step.rewards[1]

    words = "rock", "paper", "scissors"  # each beats the one before it
    table = [[earned(own, other) for other in words] for own in words]
    assert table == [[(0, 0), (-1, 1), (1, -1)], [(1, -1), (0, 0), (-1, 1)], [(-1, 1), (1, -1), (0, 0)]]
    assert earned("rock", "play") == (1, -3) and earned("play", "") == (-3, -3)
    assert earned("paper rock", "rock", opponent="scissors") == (-1, 1), "the first word counts"
    _, test = load("prepare").TASKS["league"].draw(random.Random(0), 10)
    assert {task["extra_info"]["opponent"] for task in test} == {*words}
    turns = [{"agent": agent, "reward": 1 - 2 * agent, "content": "rock it"} for agent in (0, 1)]
    score = load("reward").compute_score
    assert score("against_scissors", "", "", {"conversation": turns, "agent": 0}) == {
        **{"score": 0.0, "earned": 1, "says_rock": 1.0, "says_paper": 0.0, "says_scissors": 0.0}
    }
    assert score("league", "", "", {"conversation": turns, "agent": 1}) == {"score": 0.0}


def test_a_tournament_weights_the_games_of_each_pair():
    game = load("games").Tournament({"0-1": 3.0, "1-2": 1.0})
    game.reset({"extra_info": {}}, 0)
    step = game.step({0: "rock", 1: "paper it", 2: "scissors"})
    assert step.done and step.rewards == {0: -1.0, 1: (3 - 1) / 4, 2: 1.0}
    assert load("games").Tournament({"0-1": 1.0}).step({0: "rock", 1: "rock", 2: "paper"}).rewards[2] == 0.0


def test_the_worker_calls_the_tool_by_words_of_its_tokenizer(monkeypatch):
    monkeypatch.chdir(FOLDER)
    prepare = load("prepare")
    use = tool_use(
        MultiTurnConfig(enable=True, tool_config_path="tools.yaml", max_parallel_calls=2), "node 'n'"
    )
    tasks = prepare.TASKS["planner_worker"]
    tokenizer = prepare.tokenizer_of(tasks)
    task = prepare.shop(random.Random(0))[0]
    episode = Episode(0, 0, 0, 0, {"extra_info": task["extra_info"]})
    for item in prepare.WANTED.values():
        (token,) = tokenizer.encode(prepare.call("price", item=item), add_special_tokens=False)
        calls = use.parse(tokenizer.decode([token])).calls
        (answer,) = asyncio.run(run_tools(calls, use.toolbox, episode, use.limits))
        assert answer.error is None and answer.text == str(task["extra_info"]["prices"][item])
    (refused,) = use.parse(prepare.call("price", item="gold")).calls
    (answer,) = asyncio.run(run_tools([refused], use.toolbox, episode, use.limits))
    assert answer.error == "arguments"
    spoken = {word for message in task["prompt"] for word in message["content"].split()}
    assert spoken <= set(tasks.words) and task["reward_model"]["ground_truth"] in tasks.words


def test_what_an_agent_may_not_see_or_hear_is_kept_from_it():
    view = load("views").pre_process
    said = [("user", "red fruit"), ("user", "apple"), ("assistant", "3"), ("user", "lime")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert view(messages, None) == messages
    assert view(messages, None, request=False) == messages[1:]
    deaf = [message["content"] for message in view(messages, None, others=False)]
    assert deaf == ["red fruit", "?", "3", "?"]
    assert view(messages[:2], None, request=False, others=False) == [{"role": "user", "content": "?"}]


CALL = '<tool_call>{"name":"price","arguments":{"item":"lime"}}</tool_call>'


@pytest.mark.parametrize(
    "plan, worker, answers, planner_score, worker_score",
    [
        ("lime", [CALL, "4"], ["4"], 1.0, 1.0),
        ("lime", [CALL, "5"], ["4"], 0.5, 0.3),
        ("lime", [CALL, "lime"], ["4"], 0.5, 0.25),
        ("corn", [CALL, "4"], ["4"], 0.5, 0.8),
        ("corn", [CALL, "4"], ["Error"], 0.5, 0.55),
        ("corn", ["4"], [], 0.5, 0.55),
        ("red", ["red"], [], 0.0, 0.0),
    ],
)
def test_planner_and_worker_are_paid_for_their_own_part_and_for_the_teams(
    plan, worker, answers, planner_score, worker_score
):
    said = [("user", None, "green fruit"), ("assistant", 0, plan), ("assistant", 1, worker[0])]
    said += [("tool", None, text) for text in answers]
    said += [("assistant", 1, text) for text in worker[1:]]
    conversation = [{"role": role, "agent": agent, "content": text} for role, agent, text in said]
    for message in conversation:
        if message["content"] == "Error":
            message["error"] = "arguments"
    for agent, score in ((0, planner_score), (1, worker_score)):
        info = {"conversation": conversation, "agent": agent, "wanted": "lime"}
        given = load("reward").compute_score("planner_worker", "", "4", info)
        assert given["score"] == pytest.approx(score), agent


def test_a_single_answer_is_right_or_wrong():
    score = load("reward").compute_score
    assert score("planner_worker", " 4 ", "4", {})["score"] == 1.0
    assert score("planner_worker", "4 4", "4", {})["score"] == 0.0


def test_what_a_game_gives_is_no_score_too_and_right_moves_are_counted():
    score = load("reward").compute_score
    turns = [{"role": "assistant", "agent": agent, "reward": agent - 0.5, "content": ""} for agent in (0, 1)]
    info = {"conversation": turns, "agent": 1}
    assert score("self_play", "", "4", info)["score"] == 0.0
    assert score("reasoner_actor", "", "4", info | {"agent": 0}) == {"score": 0.0, "team": 0.5}
    pile = {"role": "user", "agent": None, "content": "pile 4"}
    moves = [{"agent": 0, "content": text, "reward": 0} for text in ("1", "2 1", "")]
    right = [
        score("self_play", "", "4", {"conversation": [pile, move], "agent": 0})["right"] for move in moves
    ]
    assert right == [1.0, 0.0, 0.0]
