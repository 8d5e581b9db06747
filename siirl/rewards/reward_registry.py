"""The reward functions that come with siirl, by name. No torch: reward workers import this."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
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
    reads_truth: Callable[[Any], Any] | None = None
    """How it reads a ground truth: DataError for one that it cannot score by; None: it needs none."""

    def options(self) -> set[str]:
        """Names of the keyword arguments that it takes from reward_model.reward_kwargs."""
        return set(inspect.signature(self.fn).parameters) - SAMPLE_ARGUMENTS - SERVICES - {PARTS}


SAMPLE_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "extra_info"}

PARTS = "parts"
"""A function with an argument of this name gets what was said in parts (Said.as_dict); a batch, a list."""

BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
SERVICES = {"sandbox_fusion", "service"}  # arguments that have keys of their own in the configuration

MOST_DIGITS = 40  # of a number that is written without an exponent

REWARDS: dict[str, Reward] = {}

CUSTOM = "custom"
"""The user's own function; of several, "custom.NAME" is one of them."""


def register_reward(
    name: str,
    executor: Executor = "process",
    reads: Literal["answer", "whole"] = "answer",
    reads_truth: Callable[[Any], Any] | None = None,
) -> Callable[[ScoreFn], ScoreFn]:
    """Decorator: make a function known as `name`."""

    def register(fn: ScoreFn) -> ScoreFn:
        assert name not in REWARDS, f"two reward functions are called {name!r}"
        REWARDS[name] = Reward(name, fn, executor, reads, reads_truth)
        return fn

    return register


BUILT_IN_MODULES = (
    *("rules", "math_answer", "questions", "countdown", "ifeval_instructions", "code"),
    "reward_service",
)


def register_built_in() -> None:
    """Import the modules that register the functions of siirl."""
    for name in BUILT_IN_MODULES:
        importlib.import_module(f"siirl.rewards.{name}")


@functools.cache
def takes_parts(function: ScoreFn) -> bool:
    """Whether a reward function has an argument `parts`."""
    return PARTS in inspect.signature(function).parameters


def accepted_answers(ground_truth: Any) -> list[str]:
    """The ground truth as stripped texts, any of which is right; a list in the dataset has several.

    Values that are missing (null, NaN) and empty texts are none. A number is written in each way in which
    people write it: 7.0, which pandas makes of 7, is 7, too. numpy's values and decimals are numbers.
    DataError if nothing is left.
    """
    if hasattr(ground_truth, "tolist"):  # of numpy
        ground_truth = ground_truth.tolist()
    answers = ground_truth if isinstance(ground_truth, list | tuple | set) else [ground_truth]
    texts = [text for answer in answers for text in _spellings(answer) if text]
    if not texts:
        raise DataError("the row has no reward_model.ground_truth")
    return list(dict.fromkeys(texts))


def _spellings(answer: Any) -> list[str]:
    """A right answer as texts, its plain form first; none for a value that is missing."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    match answer:
        case None:
            return []
        case bool():
            return [str(answer), str(answer).lower()]
        case float() | Decimal():
            if answer != answer:
                return []
            number = Decimal(repr(answer)) if isinstance(answer, float) else answer
            if not number.is_finite():
                return [str(answer)]
            if abs(number.adjusted()) > MOST_DIGITS:
                return [str(answer)]
            whole = number == number.to_integral_value()
            return [str(int(number)) if whole else f"{number.normalize():f}", str(answer)]
        case dict():
            raise DataError(
                f"reward_model.ground_truth is a map with {', '.join(map(str, answer))}: it is a text, a "
                "number, or a list of accepted answers"
            )
        case list() | tuple():
            return [text for item in answer for text in _spellings(item)]
    return [str(answer).strip()]
