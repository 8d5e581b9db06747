"""Numbers as people write them: digits, groups, powers of ten, repeating, fractions, percents, bases."""

import re
from fractions import Fraction
from typing import Any

CLEARLY = 1e-3  # values that differ by more than this share of them are not equal under any rounding
DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,2})?")
SCIENTIFIC = re.compile(
    r"(?:(?P<factor>[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:\\times|\\cdot|\*|×)\s*)?10\s*\^\s*\{?(?P<power>[+-]?[0-9]{1,2})\}?"
)
REPEATING = re.compile(
    r"(?P<sign>-?)(?P<whole>[0-9]{0,20})\.(?P<fixed>[0-9]{0,20})"
    r"\\(?:overline|bar|dot)\s*(?:\{(?P<turns>[0-9]{1,20})\}|(?P<turn>[0-9]))(?:\.\.\.|\\[lc]?dots)?"
)
DOTTED = re.compile(
    r"(?P<sign>-?)(?P<whole>[0-9]{0,20})\.(?P<fixed>[0-9]{0,9}?)(?P<turns>[0-9]{1,9}?)(?P=turns){2,9}"
    r"(?:\.\.\.|\\[lc]?dots)"
)
FRACTION = re.compile(
    r"(?P<sign>-?)\s*(?:(?P<whole>[0-9]{1,20})(?:\s+(?=[0-9])|\s*(?=\\)))?"
    r"(?:\\[cdt]?frac\s*(?:\{\s*(?P<n1>[0-9]{1,30})\s*\}|(?P<n2>[0-9]))"
    r"\s*(?:\{\s*(?P<d1>[0-9]{1,30})\s*\}|(?P<d2>[0-9]))"
    r"|(?P<n3>[0-9]{1,30})/(?P<d3>[0-9]{1,30}))"
)
GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:(?: |~|\\ )[0-9]{3})+)(?:\.[0-9]+)?")
PERCENT = re.compile(
    r"(.*?)\s*(?:\\?%|\\text\s*\{\s*\\?%\s*\})|(.*?)\s*(?:\\text\s*\{)?\s*percent\s*\}?", re.DOTALL
)
BASES = {
    name: base
    for base, name in enumerate(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"], 2
    )
} | {"sixteen": 16}
IN_BASE = re.compile(
    rf"([0-9A-Z,]{{1,40}})_\{{?(?:\\text\{{)?\(?([0-9]{{1,2}}|{'|'.join(BASES)})\)?\}}{{0,2}}"
)
ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SPELT = (
    {name: number for number, name in enumerate(ONES)}
    | {name: 10 * number for number, name in enumerate(TENS, 2)}
    | {
        f"{name}{mark}{ONES[one]}": 10 * number + one
        for number, name in enumerate(TENS, 2)
        for one in range(1, 10)
        for mark in "- "
    }
    | {
        f"{one}{name}": number
        for name, number in (("hundred", 100), ("thousand", 1000))
        for one in ("", "one ")
    }
)
"""Numbers in words."""


def rational(text: str) -> Fraction | None:
    """The value of a number in digits or in words, or of a fraction or mixed number; else None."""
    if (spelt := SPELT.get(text.lower())) is not None:
        return Fraction(spelt)
    if match := FRACTION.fullmatch(text):
        top, bottom = (int(match[f"{k}1"] or match[f"{k}2"] or match[f"{k}3"]) for k in "nd")
        value = int(match["whole"] or 0) + Fraction(top, bottom) if bottom else None
        return -value if value is not None and match["sign"] else value
    if match := REPEATING.fullmatch(text) or DOTTED.fullmatch(text):
        turns, fixed = match["turns"] or match["turn"], match["fixed"]
        value = Fraction(int((match["whole"] or "0") + fixed), 10 ** len(fixed))
        value += Fraction(int(turns), (10 ** len(turns) - 1) * 10 ** len(fixed))
        return -value if match["sign"] else value
    if match := SCIENTIFIC.fullmatch(text):
        return Fraction(match["factor"] or 1) * Fraction(10) ** int(match["power"])
    if GROUPED.fullmatch(text):
        text = re.sub(r"[, ~\\]", "", text)
    return Fraction(text) if DECIMAL.fullmatch(text) else None


def compare_values(left: Any, right: Any) -> bool | None:
    """Equality of two numbers; None when they are so close that it is a matter of rounding."""
    if left == right:
        return True
    return False if abs(left - right) > CLEARLY * max(1, abs(left), abs(right)) else None


def of_percent(text: str) -> str | None:
    """What stands before a percent sign; None without one."""
    found = PERCENT.fullmatch(text)
    return next((part for part in found.groups() if part is not None), None) if found else None


def compare_percent(percent: str, plain: str) -> bool | None:
    """Whether percents equal a number without the sign: 50% is 50, where percents are asked, or 0.5."""
    left, right = rational(percent), rational(plain)
    if left is None or right is None:
        return None
    return left == right or left == 100 * right


def compare_based(answer: str, truth: str) -> bool | None:
    """Equality where one of the two is written in a base; None where none is."""
    values = []
    for text in (answer, truth):
        found = IN_BASE.fullmatch(re.sub(r"\s", "", text))
        base = int(BASES.get(found[2], found[2])) if found else 10
        digits = re.sub(r"[\s,]", "", found[1] if found else text)
        if not digits.isalnum() or not 2 <= base <= 36:
            return None
        values.append((found is not None, digits, base))
    if not any(written for written, _, _ in values):
        return None
    try:
        return int(values[0][1], values[0][2]) == int(values[1][1], values[1][2])
    except ValueError:
        return False
