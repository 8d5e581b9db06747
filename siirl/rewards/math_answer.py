"""Mathematical answers compared by value, through the math-verify library."""

import functools
import re
from typing import Any

from siirl.rewards.registry import accepted_answers, register_reward
from siirl.rewards.rules import last_boxed

PARSE_TIMEOUT_S = 3  # of math-verify's own alarm; what it cannot stop, the pool kills
TAIL_CHARS = 500  # an answer that is not boxed is looked for at the end of the response only
MAX_ANSWER_CHARS = 2000  # a longer answer is wrong; parsing it would take the whole timeout
INTEGER = re.compile(r"[+-]?[0-9]{1,30}")


@register_reward("math")
def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, boxed_only: bool = False
) -> float:
    r"""1 if the response's final answer equals the ground truth as a mathematical value, else 0.

    The answer is the last \boxed{...}; without one (unless boxed_only) it is what math-verify finds at the
    end of the response: "the answer is ...", else the last formula or number. Equal texts and integers are
    settled without parsing. Call it on the main thread of a process: math-verify uses SIGALRM.
    """
    boxed = last_boxed(solution_str)
    if boxed is None and boxed_only:
        return 0.0
    for truth in accepted_answers(ground_truth):
        truth = last_boxed(truth) or truth
        if boxed is not None and (verdict := _compare_text(boxed.strip(), truth.strip())) is not None:
            if verdict:
                return 1.0
            continue
        predicted = rf"\boxed{{{boxed}}}" if boxed is not None else solution_str[-TAIL_CHARS:]
        if len(predicted) <= MAX_ANSWER_CHARS and _equal(truth, predicted):
            return 1.0
    return 0.0


def _compare_text(answer: str, truth: str) -> bool | None:
    """Whether they are equal, when that is plain from the text; None when it needs mathematics."""
    if answer == truth:
        return True
    if INTEGER.fullmatch(answer) and INTEGER.fullmatch(truth):
        return int(answer) == int(truth)
    return None


def _equal(truth: str, predicted: str) -> bool:
    # imported here: the import takes a second, and only reward workers need it
    from math_verify import parse, verify

    answer = parse(predicted, parsing_timeout=PARSE_TIMEOUT_S)
    return bool(answer) and bool(verify(_parse_truth(truth), answer, timeout_seconds=PARSE_TIMEOUT_S))


@functools.lru_cache(maxsize=4096)
def _parse_truth(truth: str) -> list[Any]:
    from math_verify import parse

    return parse(rf"\boxed{{{truth}}}", parsing_timeout=PARSE_TIMEOUT_S)
