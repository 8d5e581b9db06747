"""Answers that are almost the truth, held against math-verify: our shortcuts must not say otherwise."""

import random
import re

import pytest

from siirl.errors import DataError
from siirl.rewards import math_answer
from siirl.rewards.math_answer import math

pytestmark = pytest.mark.heavy

PAIRS = 250


def verdict_of_math_verify(answer, truth):
    parse, verify = math_answer._library()
    gold, found = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
    return bool(verify(gold, found, timeout_seconds=None))


def score(answer, truth):
    return math("s", rf"so \boxed{{{answer}}}.", truth, None)


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"\sqrt{7}\cdot 5", r"5\sqrt{7}", 1.0),
        (r"(x+1)(x+2)", "x^2+3x+2", 1.0),
        (r"x^9+201x", "202x+x^9", 0.0),
        (r"\left(3, 4\right)", "(3,4)", 1.0),
        ("(3,5)", "(3,4)", 0.0),
        ("7", "(3,4)", 0.0),
        (r"\frac{a}{b}", "a/b", 1.0),
        ("3i+12", "12+3i", 1.0),
        ("12", "12+3i", 0.0),
        (r"\frac{14\pi}{2}", r"7\pi", 1.0),
    ],
)
def test_everyday_answers_are_scored_by_their_value(answer, truth, right):
    assert score(answer, truth) == right


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("7,282", "7, 282", False),  # a number, and a list of two
        ("7,282", "7282", True),
        ("7, 282", "7282", False),
        (r"7,\!282", "7282", True),
        (r"7,\!282", "7, 282", False),
        (r"7\,282", "7282", True),
        (r"2\,3", "23", False),
        ("10,000", "10, 000", False),
        ("1,234,567", "1, 234, 567", False),
        ("1,234.5", "1, 234.5", False),
        ("4 .5", "4.5", False),
        ("(1,234)", "(1, 234)", True),  # in parentheses both are pairs
        ("[1, 2)", "[1,2)", True),
        ("[1, 2)", "(1, 2)", False),
        ("(1, 2)", "(1, 2, 2)", False),
        ("1, 2", "2,1", True),
        ("50", r"50\%", True),
        ("0.5", r"50\%", True),
        ("5", r"50\%", False),
    ],
)
def test_near_misses_by_hand(one, other, equal):
    assert (score(one, other), score(other, one)) == (equal, equal)


@pytest.mark.parametrize("nothing", ["", " ", "{}", r"\,", r"\text{}", r"\text{ }", "$$", ".", r"\boxed{}"])
@pytest.mark.parametrize("truth", ["same", r"\boxed{}", "0"])
def test_an_answer_that_says_nothing_is_never_right(nothing, truth):
    truth = nothing if truth == "same" else truth
    if truth.strip():
        assert score(nothing, truth) == 0


@pytest.mark.parametrize("truth", ["", " "])
@pytest.mark.parametrize("answer", ["", "0", "x", r"\emptyset", r"\{\}"])
def test_an_empty_truth_is_refused_whatever_is_said(answer, truth):
    with pytest.raises(DataError, match=r"no reward_model\.ground_truth"):
        score(answer, truth)


def number(rng):
    groups = [f"{rng.randrange(1000):03}" for _ in range(rng.choice([1, 1, 2]))]
    return rng.choice(
        [
            str(rng.randrange(10)),
            str(rng.randrange(1000, 10000)),
            f"{rng.randrange(1, 10)}.{rng.randrange(100)}",
            ",".join([str(rng.randrange(1, 1000)), *groups]),
            rf"\frac{{{rng.randrange(1, 9)}}}{{{rng.randrange(1, 9)}}}",
        ]
    )


def answer_of(rng):
    one, other = number(rng), number(rng)
    unit = rng.choice([r"\text{ cm}", " cm", r"\%", r"^\circ", r"\text{ m}"])
    sign = rng.choice("+-/")
    pairs = [f"{one},{other}", f"({one},{other})", f"[{one},{other})", rf"\{{{one},{other}\}}"]
    return rng.choice([one, *pairs, one + unit, f"x={one}", one + sign + other, "", r"\text{}", "a b"])


def changed(text, rng):
    """The text with another separator, bracket, unit or space."""
    at = rng.randrange(len(text) + 1)
    for command in re.finditer(r"\\(?:[A-Za-z]+|.)", text):
        at = command.start() if command.start() < at < command.end() else at
    space = rng.choice([" ", " ", r"\,", r"\;", r"\!", r"\ "])
    return rng.choice(
        [
            text.replace(",", ", "),
            text.replace(",", ", ", 1),
            text.replace(",", rng.choice(["{,}", r",\!", r"\,", ""])),
            text[:at] + space + text[at:],
            text[:at] + space + text[at:],
            text.replace("(", "[").replace(")", "]"),
            re.sub(r"\\text\{.*?\}| cm|\\%", "", text),
            text.replace("1", "2", 1),
            rng.choice(["", "{}", " "]),
        ]
    )


def in_print(text):
    """What a reader sees: spaces that stand between digits, commas and points count, others do not."""
    text = re.sub(r"\\!\s*", "", text)
    groups = r"(?<![\d.,])\d{1,3}(?:\\[,;]\d{3})+(?!\d)"  # 7\,282 is a number with a thin space
    text = re.sub(groups, lambda found: re.sub(r"\\[,;]", "", found[0]), text)
    text = re.sub(r"\\[,; ]|\s", " ", text)
    return re.sub(r"(?<![\w,.]) +| +(?![\w,.])", "", text)


def without_percent(text):
    return re.sub(r"\s*\\%$", "", text.strip())


def test_random_near_misses_have_the_verdict_of_math_verify():
    r"""But what says nothing is not right, and what looks the same, or is 50% for 50, is not wrong."""
    rng = random.Random(20)
    seen = {True: 0, False: 0}
    for _ in range(PAIRS):
        truth = answer_of(rng)
        answer = changed(truth, rng).removesuffix("\\ ")  # both are stripped of white space
        if rng.random() < 0.5:
            truth, answer = answer, truth
        if not truth.strip():
            continue  # refused
        wanted = verdict_of_math_verify(answer, truth)
        if not re.sub(r"\\text|\\[,;! ]|[\s{}]", "", answer):
            wanted = False
        elif in_print(without_percent(answer)) == in_print(without_percent(truth)):
            wanted = True
        assert score(answer, truth) == wanted, (answer, truth)
        seen[wanted] += 1
    assert min(seen.values()) > PAIRS / 5, seen
