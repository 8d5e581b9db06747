"""Reward of IFEval: instructions whose following can be checked from the text alone (Zhou et al., 2023)."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from siirl.errors import ConfigError, DataError
from siirl.rewards.reward_registry import register_reward
from siirl.user_code.extras import missing_extra

SENTENCE_END = re.compile(r"""[.!?]+(?=[\s"')\]*]|$)|\n+""")
ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|Jr|Sr|[A-Z])\.|(?<=\d)\.(?=\d)")
WORD = re.compile(r"\w+(?:['’-]\w+)*")
BULLET = re.compile(r"^\s*(?:[*-]|•)(?!\*)\s*\S", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*")
FENCE = re.compile(r"^```(?:json)?\s*|\s*```$", re.IGNORECASE)
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

LANGUAGE = "language:response_language"

Check = Callable[..., bool]


def _related(count: int, number: int, relation: str | None) -> bool:
    """Whether a count is "at least" (the default) a number, or "less than" it."""
    return count < number if relation == "less than" else count >= number


def _count(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _sentences(text: str) -> int:
    parts = SENTENCE_END.split(ABBREVIATION.sub("x", text))
    return sum(WORD.search(part) is not None for part in parts)


def _paragraphs(text: str, mark: str) -> list[str]:
    return [part.strip() for part in re.split(mark, text) if part.strip()]


def _nth_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = _paragraphs(text, r"\n\n")
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = WORD.search(parts[nth_paragraph - 1])
    return first is not None and first[0].lower() == first_word.lower()


def _is_json(text: str) -> bool:
    try:
        json.loads(FENCE.sub("", text.strip()))
    except (ValueError, RecursionError):
        return False
    return True


def _in_language(text: str, language: str) -> bool:
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # the same verdict each time
    try:
        return detect(text) == language
    except LangDetectException:  # a text without letters
        return False


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in WORD.findall(text))


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, keywords: all(_count(word, text) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation=None: _related(
        _count(keyword, text), frequency, relation
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_count(word, text) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation=None: _related(
        text.lower().count(letter.lower()), let_frequency, let_relation
    ),
    LANGUAGE: _in_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation=None: _related(
        _sentences(text), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        len(_paragraphs(text, r"\s?\*\*\*\s?")) == num_paragraphs
    ),
    "length_constraints:number_words": lambda text, num_words, relation=None: _related(
        len(WORD.findall(text)), num_words, relation
    ),
    "length_constraints:nth_paragraph_first_word": _nth_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: any(
        re.sub(r"[\s.]", "", line).lower().startswith(re.sub(r"[\s.]", "", postscript_marker).lower())
        for line in text.splitlines()
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(BULLET.findall(text)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(option in text for option in OPTIONS),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        len(HIGHLIGHT.findall(text)) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text: bool(re.search(r"<<[^\n<>]*\S[^\n<>]*>>", text)),
    "combination:two_responses": lambda text: (
        len(parts := _paragraphs(text, r"\*{6}")) == 2 and parts[0] != parts[1]
    ),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation=None: _related(
        _capital_words(text), capital_frequency, capital_relation
    ),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Instruction -> whether a text follows it; arguments by the names that the data set gives them."""


def read_instructions(ground_truth: Any) -> list[tuple[str, dict[str, Any]]]:
    """(instruction, arguments) of a truth {instruction_id_list, kwargs}, or that as JSON text.

    DataError for another form, an instruction that is not known, or one without its arguments.
    """
    try:
        given = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        names, arguments = list(given["instruction_id_list"]), given.get("kwargs") or []
        arguments = json.loads(arguments) if isinstance(arguments, str) else list(arguments)
        arguments = [json.loads(one) if isinstance(one, str) else one or {} for one in arguments]
        arguments = arguments or [{}] * len(names)
        pairs = [(name, _given(one)) for name, one in zip(names, arguments, strict=True)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"reward_model.ground_truth is {ground_truth!r:.80}: instructions of IFEval are "
            "{instruction_id_list: [...], kwargs: [{...}, ...]}, as many of both"
        ) from error
    for name, one in pairs:
        if name == LANGUAGE and (problem := missing_extra("langdetect")):
            raise DataError(f"the instruction {name!r} asks for a language: {problem}")
        if name not in CHECKS:
            raise DataError(f"the instruction {name!r} is none that is checked: {', '.join(CHECKS)}")
        try:
            CHECKS[name]("a", **one) if name != LANGUAGE else one["language"]
        except (TypeError, KeyError, AttributeError) as error:
            raise DataError(f"the instruction {name!r} has the arguments {one}: {error}") from error
    if not pairs:
        raise DataError("the row has no instructions")
    return pairs


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without those that a column of structs fills in; counts that pandas made 3.0 of 3 are 3."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in arguments.items()
        if value is not None and value == value
    }


@register_reward("ifeval", reads_truth=read_instructions)
def ifeval(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, ifeval_score: str = "all"
) -> dict[str, float]:
    """1 if the response follows all instructions of the row; ifeval_score "share": the share that it follows.

    The instructions are those of the ground truth, {instruction_id_list, kwargs}, each checked as the strict
    rule of the paper does. An empty response follows none.
    """
    if ifeval_score not in ("all", "share"):
        raise ConfigError(
            f"reward_model.reward_kwargs.ifeval_score={ifeval_score!r}: ifeval knows all and share. Use one."
        )
    pairs = read_instructions(ground_truth)
    followed = [bool(solution_str.strip()) and CHECKS[name](solution_str, **one) for name, one in pairs]
    share = sum(followed) / len(pairs)
    return {"score": share if ifeval_score == "share" else float(all(followed)), "followed": share}
