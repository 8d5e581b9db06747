"""Rewards of questions with choices, and of questions that are answered in a few words."""

import re
import string
from collections import Counter
from typing import Any

from siirl.errors import ConfigError, DataError
from siirl.rewards.final_answer import marked_answer, tagged_answer
from siirl.rewards.reward_registry import accepted_answers, register_reward

WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed)\s*\{([^{}]*)\}")
LETTER = re.compile(r"\(?([A-Za-z])\)?(?:$|[.:),\s]\s*(?P<rest>.*))", re.DOTALL)
OPTION = re.compile(r"(?:option|choice)\s+", re.IGNORECASE)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def read_choice(ground_truth: Any) -> list[str]:
    """The letters of right choices, "A" for the index 0. DataError if the truth is neither."""
    letters = []
    for text in accepted_answers(ground_truth):
        letter = chosen_letter(text)
        if text.isdecimal() and int(text) < len(string.ascii_uppercase):
            letter = string.ascii_uppercase[int(text)]
        if letter is not None:
            letters.append(letter)
    if not letters:
        raise DataError(
            f"reward_model.ground_truth is {ground_truth!r:.60}: it is the letter of a choice, or its number "
            "from 0"
        )
    return letters


def chosen_letter(text: str) -> str | None:
    """The letter of the choice that an answer names, as in (B), B. 12, option b; None for none or two."""
    plain = OPTION.sub("", WRAPPED.sub(r"\1", text).strip().strip("*$ ").rstrip(".!"), count=1).strip()
    found = LETTER.fullmatch(plain)
    if found is None:
        return None
    rest = (found["rest"] or "").strip()
    labelled = re.match(r"\(?[A-Za-z](?:\)|[.:])", plain) is not None
    if rest and (not labelled or re.match(r"(?:,|and|or|/|&)?\s*\(?[A-J]\)?(?:[.:)]|$)", rest)):
        return None
    return found[1].upper()


@register_reward("multiple_choice", executor="inline", reads_truth=read_choice)
def multiple_choice(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    r"""1 if the response names the letter of the right choice, else 0.

    Its answer is in <answer> tags, in \boxed, after "answer is" or "answer:", else all of the last line. The
    truth is a letter, or the number of the choice from 0.
    """
    answer = marked_answer(solution_str)
    if answer is None:
        answer = (solution_str.strip().splitlines() or [""])[-1]
    return float(chosen_letter(answer) in read_choice(ground_truth))


def read_targets(ground_truth: Any) -> list[str]:
    """The accepted answers of a question: the truth, or what it holds as target. DataError for none."""
    if isinstance(ground_truth, dict):
        ground_truth = next(
            (ground_truth[key] for key in ("target", "answers", "answer") if key in ground_truth), None
        )
        if isinstance(ground_truth, dict):
            ground_truth = ground_truth.get("text")
    return accepted_answers(ground_truth)


def plain_words(text: str) -> list[str]:
    """The words of an answer, without case, articles and punctuation (Rajpurkar et al., 2016)."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


@register_reward("search_qa", executor="inline", reads_truth=read_targets)
def search_qa(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, qa_metric: str = "em"
) -> float:
    """How well the answer in the last <answer> tags, else the whole response, agrees with an accepted one.

    qa_metric "em": 1 if the words are the same; "f1": the harmonic mean of the shares of words that both have
    (Rajpurkar et al., 2016), the best over the accepted answers.
    """
    if qa_metric not in ("em", "f1"):
        raise ConfigError(
            f"reward_model.reward_kwargs.qa_metric={qa_metric!r}: search_qa knows em and f1. Use one."
        )
    tagged = tagged_answer(solution_str)
    words = plain_words(solution_str if tagged is None else tagged)
    score = _same if qa_metric == "em" else _overlap
    return max(score(words, plain_words(target)) for target in read_targets(ground_truth))


def _same(words: list[str], target: list[str]) -> float:
    return float(bool(words) and words == target)


def _overlap(words: list[str], target: list[str]) -> float:
    shared = sum((Counter(words) & Counter(target)).values())
    return 2 * shared / (len(words) + len(target)) if shared else 0.0
