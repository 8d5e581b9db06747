"""The reward functions that come with siirl, by name. No torch: reward workers import this."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from siirl.errors import DataError

Score = float | dict[str, Any]
Executor = Literal["inline", "process", "thread"]
ScoreFn = Callable[..., Score]


@dataclass(frozen=True)
class Reward:
    """A reward function, called as fn(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs).

    It returns a finite number, or a dict with "score" and further numbers or texts.
    """

    name: str
    fn: ScoreFn
    executor: Executor
    """What calls it: "inline" (the rank's own process) if it takes microseconds and cannot hang; "process" (a
    reward worker) if it computes or may hang; "thread" if it waits for a service and bounds its own time."""
    reads: Literal["answer", "whole"] = "answer"
    """What its solution_str is: the answer, without reasoning and tool calls, or all that was said."""

    def options(self) -> set[str]:
        """Names of the keyword arguments that it takes from reward_model.reward_kwargs."""
        return set(inspect.signature(self.fn).parameters) - SAMPLE_ARGUMENTS - SERVICES - {PARTS}


SAMPLE_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "extra_info"}

PARTS = "parts"
"""A function with an argument of this name gets what was said in parts (Said.as_dict); a batch, a list."""

BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
SERVICES = {"sandbox_fusion", "service"}  # arguments that have keys of their own in the configuration

REWARDS: dict[str, Reward] = {}


def register_reward(
    name: str, executor: Executor = "process", reads: Literal["answer", "whole"] = "answer"
) -> Callable[[ScoreFn], ScoreFn]:
    """Decorator: make a function known as `name`."""

    def register(fn: ScoreFn) -> ScoreFn:
        assert name not in REWARDS, f"two reward functions are called {name!r}"
        REWARDS[name] = Reward(name, fn, executor, reads)
        return fn

    return register


@functools.cache
def takes_parts(function: ScoreFn) -> bool:
    """Whether a reward function has an argument `parts`."""
    return PARTS in inspect.signature(function).parameters


def accepted_answers(ground_truth: Any) -> list[str]:
    """The ground truth as stripped texts; a list in the dataset means that any of them is right.

    DataError if there is none.
    """
    if ground_truth is None or ground_truth == []:
        raise DataError("the row has no reward_model.ground_truth")
    answers = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return [str(answer).strip() for answer in answers]
