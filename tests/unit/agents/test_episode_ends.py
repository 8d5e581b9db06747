"""An episode that is over before its last node says why, in words of workflow and configuration."""

import pytest
from episode_cases import Script, play, speaker, stage

from siirl.agents.contexts import Limits
from siirl.agents.environments import HostedEnvironment

SMALL, TIGHT = Limits(9, 100), Limits(9, 12)


class Game:
    def __init__(self, steps):
        self.steps = steps

    def reset(self, task, seed):
        return ""

    def step(self, actions):
        self.steps -= 1
        return "", {0: 0.0}, not self.steps


def ended(last=None, limits=None, functions=None, steps=9, **first):
    """Why an episode of a (agent 0), b (agent 1) and a game is over; last: of the plan of the game."""
    stages = [
        stage("a", 0, following="b", **first),
        stage("b", 1, following="game"),
        stage("game", None, **(last or {})),
    ]
    speakers = {"a": speaker(Script(*"135")), "b": speaker(Script(*"246"), limits)}
    (one,) = play(stages, speakers, functions, lambda: HostedEnvironment(lambda: Game(steps), "game"))
    assert one.kind is None
    return one.episode.ended, one.full


BACK = {"back_to": "a", "max_turns": 3}
CASES = {
    "its last node": ({}, "", False),
    "done": ({"last": BACK, "steps": 2}, "game said done", False),
    "bound": ({"last": BACK}, "game has run loop.max_turns=3 times", False),
    "until": (
        {"last": {**BACK, "until": "f:won"}, "functions": {"f:won": lambda episode: episode.turns == 4}},
        "f:won is true",
        False,
    ),
    "route": ({"route": "f:to", "functions": {"f:to": lambda episode: None}}, "f:to gave None", False),
    "prompt": (
        {"limits": Limits(7, 100)},
        "what b reads (10 tokens) does not fit data.max_prompt_length=7",
        True,
    ),
    "response": (
        {"last": BACK, "limits": Limits(10, 8)},
        "what b reads (18 tokens) does not fit data.max_prompt_length=10, and what is new in it not the "
        "rest of data.max_response_length=8",
        True,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_why_an_episode_is_over(case):
    options, why, full = CASES[case]
    assert ended(**options) == (why, full)
