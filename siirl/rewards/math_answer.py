"""Mathematical answers compared by value, through the math-verify library."""

import functools
import logging
import zlib
from math import isfinite
from typing import Any

from siirl.errors import ScoreTimeoutError
from siirl.rewards.cpu_limit import cpu_limit
from siirl.rewards.final_answer import (
    boxed_answer,
    concluded_answer,
    stated_answer,
    tagged_answer,
)
from siirl.rewards.math_text import (
    NOTHING,
    as_interval,
    compare_text,
    compare_values,
    labelled,
    residue_of,
    tidy,
)
from siirl.rewards.reward_registry import accepted_answers, register_reward
from siirl.rewards.rules import boxes, last_boxed

MAX_ANSWER_CHARS = 2000  # a longer answer is wrong; parsing it would take the whole time
DIGITS = 15


@register_reward("math", reads_truth=accepted_answers)
def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    boxed_only: bool = False,
    compare_timeout_s: float = 3.0,
) -> float:
    r"""1 if the response's final answer equals the ground truth as a mathematical value, else 0.

    The answer is the last \boxed{...}, several together if they are offered together; without one (unless
    boxed_only) what is stated near the end: in <answer> tags, "the answer is ...", "#### ...", the number or
    formula that is the last line or with which the last sentence ends. A box, formula or sentence that is cut
    off is no answer, and one that says nothing is never right. Texts, numbers, words and choices are compared
    as such, the rest by math-verify. ScoreTimeoutError if that takes more than compare_timeout_s of processor
    time. Call it on the main thread of a process.
    """
    solution_str = solution_str.rpartition("</think>")[2]
    found, is_open = boxes(solution_str)
    if "<think>" in solution_str:
        answer = None  # it has not ended to think
    elif found or is_open or boxed_only:
        answer = boxed_answer(solution_str)
    else:
        answer = tagged_answer(solution_str) or stated_answer(solution_str)
        answer = concluded_answer(solution_str) if answer is None else answer
    return _score(answer, ground_truth, compare_timeout_s)


@register_reward("math_dapo", reads_truth=accepted_answers)
def math_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, compare_timeout_s: float = 3.0
) -> float:
    r"""1 if the answer that is marked as such equals the ground truth, as `math` compares them, else 0.

    It is what follows the last "Answer:" near the end, which prompts of DAPO ask for, else the last
    \boxed{...}; a response without either has none.
    """
    stated = stated_answer(solution_str)
    return _score(boxed_answer(solution_str) if stated is None else stated, ground_truth, compare_timeout_s)


def _score(answer: str | None, ground_truth: Any, timeout_s: float) -> float:
    accepted = accepted_answers(ground_truth)
    if answer is None or NOTHING.fullmatch(answer):
        return 0.0
    late: ScoreTimeoutError | None = None
    for truth in accepted:
        try:
            if _is_right(answer, last_boxed(truth) or truth.rpartition("####")[2], timeout_s):
                return 1.0
        except ScoreTimeoutError as error:
            late = error
    if late is not None:
        raise late
    return 0.0


def _is_right(answer: str, truth: str, timeout_s: float) -> bool:
    if len(answer) > MAX_ANSWER_CHARS:
        return answer == truth
    answer, truth = tidy(answer), tidy(truth)
    (residue, modulus), (wanted, other) = residue_of(answer), residue_of(truth)
    if modulus and other and modulus != other:
        return False
    if modulus or other:
        answer, truth = residue, wanted
    if (verdict := compare_text(answer, truth)) is not None:
        return verdict
    if (rest := labelled(answer)) is not None:
        return _is_right(rest, truth, timeout_s)
    if (rest := labelled(truth)) is not None:
        return _is_right(answer, rest, timeout_s)
    one, other = as_interval(answer), as_interval(truth)
    if (one is None) != (other is None):
        answer, truth = one or answer, other or truth
    return _equal(truth, rf"\boxed{{{answer}}}", timeout_s)


@functools.lru_cache(maxsize=1 << 14)
def _equal(truth: str, predicted: str, timeout_s: float) -> bool:
    """The verdict of math-verify, without its own time limits: those count wall time, and then say "no"."""
    parse, verify = _library()
    with cpu_limit(timeout_s, f"comparing the answer with {truth[:60]!r}"):
        gold, answer = _parse_truth(truth), parse(predicted, parsing_timeout=None)
        if not gold or not answer or _clearly_differ(gold, answer):
            return False
        return bool(verify(gold, answer, timeout_seconds=None))


def _clearly_differ(gold: list[Any], answer: list[Any]) -> bool:
    """Whether both are expressions of plainly different value: cheaper by far than verify's simplification.

    Expressions with symbols are compared at one positive point: where they differ, they are not identical.
    Percentages are left to verify, which has rules of its own for them, and so is all that has no real value.
    """
    if any("%" in str(text) for text in (gold[-1], answer[-1])):
        return False
    left, right = _value_at_point(gold[0]), _value_at_point(answer[0])
    return left is not None and right is not None and compare_values(left, right) is False


def _value_at_point(expression: Any) -> float | None:
    """The real value of a sympy expression, its symbols replaced by fixed numbers; None if it has none."""
    from sympy import Expr

    if not isinstance(expression, Expr):
        return None
    point = {symbol: 0.4 + zlib.crc32(str(symbol).encode()) % 97 / 100 for symbol in expression.free_symbols}
    try:
        value = float(expression.evalf(DIGITS, subs=point))
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None  # complex, or not a number
    return value if isfinite(value) else None


@functools.lru_cache(maxsize=4096)
def _parse_truth(truth: str) -> list[Any]:
    parse, _ = _library()
    return parse(rf"\boxed{{{truth}}}", parsing_timeout=None)


@functools.cache
def _library() -> tuple[Any, Any]:
    """math-verify's parse and verify. Imported on demand, which takes a second, in reward workers only."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    return parse, verify
