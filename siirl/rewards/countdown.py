"""Rewards of made puzzles: Countdown, an expression that uses given numbers once each and has a given value;
and prompts that reasoning-gym makes, by its own scores. No torch.
"""

import ast
import json
import operator
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from siirl.errors import DataError
from siirl.rewards.final_answer import marked_answer
from siirl.rewards.reward_registry import register_reward

MOST_CHARS = 500  # of an expression
SIGNS = {"×": "*", "÷": "/", "−": "-", "–": "-", r"\times": "*", r"\cdot": "*", r"\div": "/"}
FRAC = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def read_task(ground_truth: Any) -> tuple[Fraction, list[int]]:
    """(target, numbers) of a truth {target, numbers}, or that as JSON text; `nums` means numbers, too."""
    try:
        given = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        numbers = given["numbers"] if "numbers" in given else given["nums"]
        task = Fraction(given["target"]), [int(number) for number in numbers]
    except (KeyError, TypeError, ValueError):
        task = Fraction(0), []
    if not task[1]:
        raise DataError(
            f"reward_model.ground_truth is {ground_truth!r:.80}: a task of Countdown is "
            "{target: 98, numbers: [44, 19, 35]}"
        )
    return task


@register_reward("countdown", executor="inline", reads_truth=read_task)
def countdown(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, format_score: float = 0.0
) -> float:
    r"""1 if the answer uses each number once, with + - * / and parentheses, and its value is the target.

    The answer is in <answer> tags, in \boxed, or stated; "= target" behind it is left out. format_score if it
    is such an expression with another value or other numbers, else 0.
    """
    target, numbers = read_task(ground_truth)
    answer = marked_answer(solution_str)
    if answer is None or len(answer) > MOST_CHARS:
        return 0.0
    text = FRAC.sub(r"((\1)/(\2))", answer)
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    expression, *results = text.strip().strip("$").rstrip(".").split("=")
    used: list[int] = []
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
        wrong_result = any(Fraction(result.strip()) != value for result in results)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    right = value == target and Counter(used) == Counter(numbers) and not wrong_result
    return 1.0 if right else float(format_score)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The value of an expression; its numbers are added to `used`. ValueError for anything else in it."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left, used), _value(right, used))
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            used.append(number)
            return Fraction(number)
    raise ValueError("no expression of numbers")


@register_reward("reasoning_gym")
def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, answer_tag: str = "answer"
) -> float:
    """What the data set's own score_answer gives: between 0 and 1.

    The answer is what the last <answer>...</answer> holds, or another answer_tag, else the whole response.
    """
    from siirl.data.reasoning_gym_rows import dataset_of  # pyarrow, which other reward workers do not need

    row = extra_info if isinstance(extra_info, dict) else {}
    if not {"dataset", "entry"} <= row.keys():
        raise DataError(
            f"the row of {data_source!r} is none that reasoning_gym:TASK?size=N&seed=N makes: its extra_info "
            "lacks dataset and entry"
        )
    dataset = dataset_of(row["dataset"])
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(solution_str, answer_tag)
    answer = solution_str.strip() if answer is None else answer
    return float(dataset.score_answer(answer, ast.literal_eval(row["entry"])))
