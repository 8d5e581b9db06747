"""Environments of Gymnasium by their names: what they show, take and pay is the package's."""

import asyncio
import importlib.util

import pytest

from siirl.agents.environments import check_packaged, load_environment
from siirl.errors import DagError

gymnasium = pytest.importorskip("gymnasium", reason="pip install 'siirl[gymnasium]'")
WHO = "node 'game': env_path"


async def play(make, says, seed):
    """(what the agent reads, what it earns) of an episode, turn by turn."""
    env = make()
    try:
        read, paid = [(await env.reset({}, seed, 20)).text_for(0)], []
        for said in says:
            result = await env.step({0: said}, 20)
            read.append(result.text_for(0))
            paid.append(result.rewards)
            if result.done:
                break
    finally:
        await env.close()
    return read, paid


def theirs(name, actions, seed, **kwargs):
    env = gymnasium.make(name, **kwargs)
    seen, paid = [env.reset(seed=seed)[0]], []
    for action in actions:
        observation, reward, *ended, _ = env.step(action)
        seen.append(observation)
        paid.append(reward)
        if any(ended):
            break
    env.close()
    return seen, paid


@pytest.mark.parametrize(
    "name, kwargs, actions",
    [
        ("FrozenLake-v1", {"is_slippery": True}, [2, 2, 1, 1, 1, 2, 0, 1, 2, 2, 1, 2]),
        ("Blackjack-v1", {"natural": True}, [1, 1, 0]),
    ],
)
def test_64_episodes_pay_what_the_package_pays(name, kwargs, actions):
    make = load_environment(f"gymnasium:{name}", WHO, kwargs, max_concurrent=8)
    says = [f"I choose {action}." for action in actions]

    async def everything():
        return await asyncio.gather(*(play(make, says, seed) for seed in range(64)))

    episodes = asyncio.run(everything())
    worth = set()
    for seed, (read, paid) in enumerate(episodes):
        seen, wanted = theirs(name, actions, seed, **kwargs)
        assert read == [str(observation) for observation in seen] and paid == wanted
        worth.add(sum(wanted))
    assert len(worth) > 1


def test_words_are_actions_and_colours_are_brackets():
    words = {"actions": ["left", "down", "right", "up"], "is_slippery": False, "render_mode": "ansi"}
    make = load_environment("gymnasium:FrozenLake-v1", WHO, words)
    read, paid = asyncio.run(play(make, ["Not left, but RIGHT!", "jump", "down"], 0))
    assert read[0].splitlines()[0] == "[S]FFF" and read[1].splitlines()[:2] == ["  (Right)", "S[F]FF"]
    assert read[2] == "Answer with one of left, down, right, up." and "\x1b" not in "".join(read)
    assert read[3].splitlines()[2] == "F[H]FH" and paid == [0, 0, 0]


CART = """
def show(observation, info):
    return "left" if observation[2] < 0 else "right"

def read(text, info):
    if text not in ("push", "pull"):
        raise ValueError("Say push or pull.")
    return int(text == "push")
"""


def test_functions_of_the_user_show_and_read(tmp_path):
    (tmp_path / "cart.py").write_text(CART)
    kwargs = {"show": f"{tmp_path / 'cart.py'}:show", "read": f"{tmp_path / 'cart.py'}:read"}
    make = load_environment("gymnasium:CartPole-v1", WHO, kwargs)
    read, paid = asyncio.run(play(make, ["push", "shove", "pull"], 0))
    seen, wanted = theirs("CartPole-v1", [1, 0], 0)
    side = ["left" if observation[2] < 0 else "right" for observation in seen]
    assert read == [side[0], side[1], "Say push or pull.", side[2]] and paid == [wanted[0], 0.0, wanted[1]]


def test_numbers_are_written_with_four_digits():
    read, _ = asyncio.run(play(load_environment("gymnasium:CartPole-v1", WHO), [], 1))
    assert read == ["[0.001182, -0.03558, 0.04504, 0.04486]"] or len(read[0].split(", ")) == 4


@pytest.mark.parametrize(
    "name, kwargs, words",
    [
        ("FrozenLak-v1", {}, "doesn't exist. Did you mean: `FrozenLake`"),
        ("FrozenLake-v1", {"slippery": True}, "unexpected keyword argument 'slippery'.*Correct the name"),
        ("FrozenLake-v1", {"actions": ["left", "right"]}, "2 words for the actions Discrete"),
        ("Pendulum-v1", {}, r"actions are Box.* Set env_kwargs.read: file.py:fn"),
    ],
)
def test_what_cannot_be_acted_in_by_words_is_refused(name, kwargs, words):
    with pytest.raises(DagError, match=words):
        check_packaged(f"gymnasium:{name}", WHO, kwargs)


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
    find = importlib.util.find_spec
    hidden = ("gymnasium",)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    with pytest.raises(DagError) as refused:
        check_packaged("gymnasium:FrozenLake-v1", WHO, {})
    assert str(refused.value) == (
        f"{WHO} = 'gymnasium:FrozenLake-v1': the package gymnasium is not installed. Install it: "
        "pip install 'siirl[gymnasium]'."
    )
