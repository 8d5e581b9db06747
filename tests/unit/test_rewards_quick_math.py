"""Formulas settled by evaluation: what is known agrees with math-verify, and what is not is left to it."""

import itertools

import pytest

from siirl.rewards import math_answer, quick_math

ALIKE = [
    r"5\sqrt{7} | \sqrt{7}\cdot 5 | \sqrt{175} | 5\sqrt{8} | 13.2287565553",
    r"(3, 4) | \left(3,4\right) | (4,3) | (3, 5) | \{3,4\} | (3,4,5) | 3",
    r"x^2+3x | x(x+3) | x*(x+3) | x^{2} + 4 x | y^2+3y",
    r"7\pi | \pi\cdot 7 | 8\pi | 21.991148575 | \frac{14\pi}{2}",
    r"12+3i | 3i+12 | 12-3i | 15",
    r"2\frac{1}{2} | \frac{5}{2} | 1",
    r"1/2x | \frac{x}{2} | \frac{1}{2x}",
    r"1,000 | (1,000) | 1000.5+\pi",
    r"\frac{\sqrt{3}}{2} | \sqrt{3}/2 | \frac{3}{2\sqrt{3}}",
    r"10^{20}+\pi | 10^{20}",
]


@pytest.mark.parametrize("group", ALIKE)
def test_what_is_settled_agrees_with_math_verify(group):
    texts = [text.strip() for text in group.split("|")]
    for truth, answer in itertools.permutations(texts, 2):
        verdict = quick_math.compare(answer, truth)
        if verdict is not None:
            assert math_answer._equal(truth, rf"\boxed{{{answer}}}", 60.0) == verdict, (truth, answer)


@pytest.mark.parametrize(
    ("answer", "truth", "verdict"),
    [
        (r"\sqrt{7}\cdot 5", r"5\sqrt{7}", True),
        (r"(x+1)(x+2)", "x^2+3x+2", True),
        (r"x^9+201x", "202x+x^9", False),
        (r"\left(3, 4\right)", "(3,4)", True),
        ("(3,5)", "(3,4)", False),
        ("7", "(3,4)", False),
        (r"\frac{a}{b}", "a/b", True),
        ("3i+12", "12+3i", True),
        ("12", "12+3i", False),
        (r"\frac{\pi}{0}", r"\pi", None),
    ],
)
def test_everyday_answers_are_settled(answer, truth, verdict):
    assert quick_math.compare(answer, truth) is verdict


@pytest.mark.parametrize(
    "text",
    [
        r"2\frac{1}{2}",
        "1/2x",
        "f(x)",
        "ab",
        "1,000",
        "(1,000)",
        "x^10",
        r"50\%",
        r"\sqrt{x^2}",
        r"\sqrt{-1}",
        r"\sin x",
        "x=5",
        "T",
        r"10^{99}",
        r"\sqrt{2}+10000000",
        "(" * 300 + "1" + ")" * 300,
        "",
        "1 2",
        "(1",
        "1)",
        r"\frac{1}",
    ],
)
def test_what_might_be_read_in_another_way_is_left_to_math_verify(text):
    assert quick_math.compare(text, "x+1") is None and quick_math.compare("x+1", text) is None


def test_nearly_equal_numbers_are_left_to_math_verify():
    assert quick_math.compare("1.4142136", r"\sqrt{2}") is None
    assert quick_math.compare("3.14159", r"\pi") is None
