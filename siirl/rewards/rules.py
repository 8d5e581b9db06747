"""Rewards that compare text by simple rules, in time linear in its length."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from siirl.errors import ConfigError
from siirl.rewards.reward_registry import accepted_answers, register_reward

FINAL_CHARS = 300  # a GSM8K answer is looked for at the end of the response only
STRICT_ANSWER = re.compile(r"####\s*\$?\s*(-?\$?[0-9.,]*[0-9])")
BRACES = re.compile(r"\\(?:boxed|fbox)\s?\{|\\.|[{}]", re.DOTALL)
NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")


@register_reward("exact_match", executor="inline", reads_truth=accepted_answers)
def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """1 if the response equals the ground truth, white space at both ends aside."""
    return float(solution_str.strip() in accepted_answers(ground_truth))


@register_reward("gsm8k", executor="inline", reads_truth=accepted_answers)
def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    method: str = "strict",
    format_score: float = 0.0,
) -> float:
    """1 if the answer is the right number, format_score if there is an answer but a wrong one, else 0.

    method "strict": the answer is the number after the last "####"; "flexible": the last number of the
    response.
    """
    end = solution_str[-FINAL_CHARS:]
    match method:
        case "strict":
            found = STRICT_ANSWER.findall(end)
        case "flexible":
            found = NUMBER.findall(end)
        case _:
            raise ConfigError(
                f"reward_model.reward_kwargs.method={method!r}: gsm8k knows strict and flexible. Use one."
            )
    if not found:
        return 0.0
    answer = _number(found[-1])
    right = any(
        answer == _number(accepted.rpartition("####")[2]) for accepted in accepted_answers(ground_truth)
    )
    return 1.0 if right else float(format_score)


@register_reward("think_format", executor="inline", reads="whole")
def think_format(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, parts: Mapping[str, Any]
) -> float:
    """1 if the response is reasoning and then an answer, neither of them empty, else 0.

    Reasoning stands between the model's own marks, <think> and </think> unless it has others; the prompt may
    have opened it.
    """
    reasoned = parts["stretches"] == 1 and parts["leads"] and parts["closed"]
    return float(reasoned and bool(parts["reasoning"].strip()) and bool(parts["answer"].strip()))


@register_reward("boxed_format", executor="inline")
def boxed_format(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    r"""1 if the response has a closed \boxed{...} that is not empty."""
    return float(bool((last_boxed(solution_str) or "").strip()))


@dataclass(frozen=True)
class Box:
    r"""A \boxed{...} in a text, by places of characters."""

    start: int
    """Of the command."""
    inner: int
    """Of what it holds."""
    end: int
    """Of the closing brace."""


def boxes(text: str) -> tuple[list[Box], bool]:
    r"""(the closed \boxed{...} and \fbox{...} that hold no other, in order; whether one after them is open).

    Braces inside are balanced; escaped ones (\{) do not count. One pass over the text.
    """
    opened: list[tuple[int, int, bool]] = []
    found: list[Box] = []
    for token in BRACES.finditer(text):
        if token[0] == "}":
            if opened:
                start, inner, boxed = opened.pop()
                if boxed and (not found or inner > found[-1].inner):
                    found.append(Box(start, inner, token.start()))
        elif token[0][-1] == "{" and token[0] != r"\{":
            opened.append((token.start(), token.end(), token[0] != "{"))
    last = found[-1].end if found else -1
    return found, any(boxed and start > last for start, _, boxed in opened)


def last_boxed(text: str) -> str | None:
    r"""What the \boxed{...} or \fbox{...} holds that opens last among the closed ones; None without one."""
    found, _ = boxes(text)
    return text[found[-1].inner : found[-1].end] if found else None


def _number(text: str) -> Decimal | str:
    plain = text.replace(",", "").replace("$", "").strip()
    try:
        return Decimal(plain)
    except InvalidOperation:
        return plain
