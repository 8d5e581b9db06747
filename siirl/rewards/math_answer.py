"""Mathematical answers compared by value, through the math-verify library."""

import functools
import logging
import re
import zlib
from fractions import Fraction
from math import isfinite
from typing import Any

from siirl.errors import ScoreTimeoutError
from siirl.rewards.cpu_limit import cpu_limit
from siirl.rewards.reward_registry import accepted_answers, register_reward
from siirl.rewards.rules import last_boxed

TAIL_CHARS = 500  # an answer that is not boxed is looked for at the end of the response only
MAX_ANSWER_CHARS = 2000  # a longer answer is wrong; parsing it would take the whole time
DIGITS = 15
CLEARLY = 1e-3  # values that differ by more than this share of them are not equal under any rounding
# a space next to a comma or a point may mean something: "7,282" is one number, "7, 282" are two
NO_MEANING = re.compile(r"\\(?:left|right)(?![A-Za-z])|(?<![0-9A-Za-z,.])\s+|\s+(?![0-9A-Za-z,.])")
NOTHING = re.compile(
    r"(?:\\(?:boxed|fbox|text|mathrm|mbox|left|right|quad|qquad)(?![A-Za-z])|\\[,;:! ]|[\s{}$~.,])*"
)
NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?")
FRACTION = re.compile(
    r"(?P<sign>-?)(\\[dt]?frac\{(?P<n1>[0-9]{1,30})\}\{(?P<d1>[0-9]{1,30})\}"
    r"|(?P<n2>[0-9]{1,30})/(?P<d2>[0-9]{1,30}))"
)
THIN_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\\[,;]\s*[0-9]{3})+(?![0-9])")
THIN = re.compile(r"(?<!\\)\\[,; ]\s*")
BACKWARDS = re.compile(r"(?<![A-Za-z\\])\\!\s*|(?<!\\)\\!\s*(?![A-Za-z])")


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

    The answer is the last \boxed{...}; without one (unless boxed_only) it is what math-verify finds at the
    end of the response: "the answer is ...", else the last formula or number. Equal texts and integers are
    settled without parsing; an answer that says nothing is never right. ScoreTimeoutError if math-verify
    takes more than compare_timeout_s of processor time. Call it on the main thread of a process.
    """
    boxed = last_boxed(solution_str)
    if boxed_only if boxed is None else NOTHING.fullmatch(boxed):
        return 0.0
    predicted = rf"\boxed{{{boxed}}}" if boxed is not None else solution_str[-TAIL_CHARS:]
    late: ScoreTimeoutError | None = None
    for truth in accepted_answers(ground_truth):
        truth = last_boxed(truth) or truth
        if boxed is not None and (verdict := _compare_text(boxed.strip(), truth.strip())) is not None:
            if verdict:
                return 1.0
            continue
        if len(predicted) > MAX_ANSWER_CHARS:
            continue
        try:
            if _equal(truth, predicted, compare_timeout_s):
                return 1.0
        except ScoreTimeoutError as error:
            late = error
    if late is not None:
        raise late
    return 0.0


def _compare_text(answer: str, truth: str) -> bool | None:
    """Whether they are equal, when that is plain from the text; None when it needs mathematics."""
    if answer == truth or _canonical(answer) == _canonical(truth):
        return True
    left, right = _rational(answer), _rational(truth)
    if left is None or right is None:
        return None
    return _compare_values(left, right)


def _canonical(text: str) -> str:
    """The text without what has no meaning in a formula: spaces around signs, sizes."""
    text = NO_MEANING.sub("", _without_thin_spaces(text))
    return text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")


def _without_thin_spaces(text: str) -> str:
    r"""The text without \!, with plain spaces for \, \; and "\ ", but none between groups of three digits."""
    text = BACKWARDS.sub("", text)
    return THIN.sub(" ", THIN_GROUPS.sub(lambda number: THIN.sub("", number[0]), text))


def _rational(text: str) -> Fraction | None:
    """The value of an integer, a decimal number, or a fraction of integers; None for anything else."""
    if match := FRACTION.fullmatch(text):
        sign, numerator, denominator = match["sign"], match["n1"] or match["n2"], match["d1"] or match["d2"]
        return Fraction(f"{sign}{numerator}/{denominator}") if int(denominator) else None
    return Fraction(text) if NUMBER.fullmatch(text) else None


def _compare_values(left: Any, right: Any) -> bool | None:
    """Equality of two numbers; None when they are so close that it is a matter of rounding."""
    if left == right:
        return True
    return False if abs(left - right) > CLEARLY * max(1, abs(left), abs(right)) else None


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
    return left is not None and right is not None and _compare_values(left, right) is False


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
