"""Games of TextArena by their names: players read what is new, and are paid as the package pays."""

import asyncio
import importlib.util
import random

import pytest
from episode_cases import Script, speaker, stage
from episode_cases import play as play_stages
from later import needed

from siirl.agents.contexts import Limits
from siirl.agents.environments import check_packaged, load_environment
from siirl.agents.textarena_env import to_move
from siirl.errors import DagError, EpisodeFailed

ta = needed("textarena", "pip install 'siirl[textarena]'")
WHO = "node 'game': env_path"
MOST = 100  # moves of a game that is looked at
SAYS = {"TicTacToe-v0": "[{}]", "KuhnPoker-v0": "[{}]", "Nim-v0": "[{} 1]"}


def mover(name: str, seed: int):
    """Random moves, some of them illegal."""
    dice, words = random.Random(seed), SAYS[name]

    def move(player):
        if name == "KuhnPoker-v0":
            return words.format(dice.choice(["check", "bet", "call", "fold"]))
        return words.format(dice.randrange(9 if name == "TicTacToe-v0" else 3))

    return move


async def play(make, move, seed=7):
    """(rewards of the players, who moved, what was read) of a game."""
    env, paid, order, read = make(), {}, [], []
    try:
        seen = await env.reset({}, seed, 20)
        for _ in range(MOST):
            player = seen.info["player"]
            order.append(player)
            read.append(seen.text_for(player))
            assert not seen.text_for(1 - player)
            result = await env.step({player: move(player)}, 20)
            if result.done:
                paid = result.rewards
                break
            seen = result
    finally:
        await env.close()
    return paid, order, read


def theirs(name, move, seed):
    """The same game by the package alone, with its own loop."""
    env, order = ta.make(name), []
    env.reset(num_players=2, seed=seed)
    for _ in range(MOST):
        player, _ = env.get_observation()
        order.append(player)
        done, _ = env.step(action=move(player))
        if done:
            return env.close()[0], order
    return {}, order


@pytest.mark.parametrize("name", SAYS)
def test_64_games_at_once_pay_what_the_package_pays(name):
    make = load_environment(f"textarena:{name}", WHO, {}, max_concurrent=16)

    async def everything():
        return await asyncio.gather(*(play(make, mover(name, seed), seed) for seed in range(64)))

    worth = set()
    for seed, (paid, order, _) in enumerate(asyncio.run(everything())):
        wanted, moved = theirs(name, mover(name, seed), seed)
        assert (paid, order) == (wanted, moved)
        worth.add(tuple(sorted(wanted.items())))
    assert len(worth) > 1


def test_each_player_reads_what_is_new_but_not_its_own_moves():
    moves = iter(["[4]", "[0]", "[1]", "[2]", "[7]"])
    paid, order, read = asyncio.run(
        play(load_environment("textarena:TicTacToe-v0", WHO), lambda _: next(moves))
    )
    assert paid == {0: 1, 1: -1} and order == [0, 1, 0, 1, 0]
    assert "You are Player 0" in read[0] and "You are Player 1" in read[1] and "You are Player" not in read[2]
    assert "[Player 0] [4]" in read[1] and "[Player 1] [0]" in read[2] and "[Player 0] [4]" not in read[2]
    assert "Player 0 placed their symbol (O) in cell 4" in read[2]


def test_the_generator_of_other_code_is_left_alone():
    random.seed(5)
    wanted = [random.random() for _ in range(3)]
    random.seed(5)
    before = random.random()
    asyncio.run(play(load_environment("textarena:KuhnPoker-v0", WHO), mover("KuhnPoker-v0", 1)))
    assert [before, random.random(), random.random()] == wanted


def test_an_illegal_move_is_the_players_again_or_ends_the_game():
    async def first_two(kwargs, second):
        env = load_environment("textarena:TicTacToe-v0", WHO, kwargs)()
        try:
            await env.reset({}, 0, 20)
            results = [await env.step({0: "nothing"}, 20)]
            return [*results, await env.step(second, 20)] if not results[0].done else results
        finally:
            await env.close()

    (lost,) = asyncio.run(first_two({"error_allowance": 0}, {1: "[0]"}))
    assert lost.done and lost.rewards == {0: -1, 1: 1} and lost.info["players"]["0"]["invalid_move"] is True
    again, _ = asyncio.run(first_two({}, {0: "[0]"}))
    assert again.info["player"] == 0 and "attempted an invalid move" in again.text_for(0)
    with pytest.raises(
        EpisodeFailed, match=r"agent 1 has spoken, and player 0 is to move.*error_allowance: 0"
    ):
        asyncio.run(first_two({}, {1: "[0]"}))


def test_a_player_who_moves_again_is_asked_again_by_a_route():
    first, second = Script("nothing", "[0]", "[1]", "[2]"), Script("[4]", "[4]", "[5]")
    stages = [
        stage("first", 0, following="game"),
        stage("game", None, following="second", back_to="first", max_turns=9, route="to_move"),
        stage("second", 1, following="game_on"),
        stage("game_on", None, back_to="first", max_turns=9, route="to_move"),
    ]
    speakers = {"first": speaker(first, Limits(5000, 5000)), "second": speaker(second, Limits(5000, 5000))}
    make = load_environment("textarena:TicTacToe-v0", WHO)
    (played,) = play_stages(stages, speakers, {"to_move": to_move}, make)
    said = [(m.agent, m.content, m.reward) for m in played.episode.messages if m.agent is not None]
    assert said == [
        (0, "nothing", 0.0),
        (0, "[0]", 0.0),
        (1, "[4]", 0.0),
        (0, "[1]", 0.0),
        (1, "[4]", 0.0),
        (1, "[5]", -1.0),
        (0, "[2]", 1.0),
    ]
    assert played.episode.done and "cell 4 is already occupied" in second.read[-1]


@pytest.mark.parametrize(
    "name, kwargs, words",
    [
        ("TicTacTo-v0", {}, "TicTacTo-v0 not found in registry.*Correct the name"),
        ("Nim-v0", {"pile": [1]}, "unexpected keyword argument 'pile'"),
        ("FrozenLake-v0", {}, "players has to be 1, received 2. Set env_kwargs.num_players"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(name, kwargs, words):
    with pytest.raises(DagError, match=words):
        check_packaged(f"textarena:{name}", WHO, kwargs)


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
    find = importlib.util.find_spec
    hidden = ("textarena",)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    with pytest.raises(
        DagError, match=r"textarena is not installed. Install it: pip install 'siirl\[textarena\]'"
    ):
        check_packaged("textarena:Nim-v0", WHO, {})
