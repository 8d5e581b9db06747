"""The reward functions that come with siirl, by name. No torch: reward workers import this."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from siirl.errors import DataError

Score = float | dict[str, Any]
ScoreFn = Callable[..., Score]


@dataclass(frozen=True)
class Reward:
    """A reward function, called as fn(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs).

    It returns a finite number, or a dict with "score" and further numbers or texts. inline: it takes
    microseconds and cannot hang, so that it is called in the rank's own process rather than in a reward
    worker.
    """

    name: str
    fn: ScoreFn
    inline: bool

    def options(self) -> set[str]:
        """Names of the keyword arguments that it takes beyond the sample."""
        return set(inspect.signature(self.fn).parameters) - SAMPLE_ARGUMENTS


SAMPLE_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "extra_info"}

REWARDS: dict[str, Reward] = {}


def register_reward(name: str, inline: bool = False) -> Callable[[ScoreFn], ScoreFn]:
    """Decorator: make a function known as `name`."""

    def register(fn: ScoreFn) -> ScoreFn:
        assert name not in REWARDS, f"two reward functions are called {name!r}"
        REWARDS[name] = Reward(name, fn, inline)
        return fn

    return register


def accepted_answers(ground_truth: Any) -> list[str]:
    """The ground truth as stripped texts; a list in the dataset means that any of them is right.

    DataError if there is none.
    """
    if ground_truth is None or ground_truth == []:
        raise DataError("the row has no reward_model.ground_truth")
    answers = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return [str(answer).strip() for answer in answers]
