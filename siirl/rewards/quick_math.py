r"""Formulas of everyday answers compared by evaluating them, a hundred times faster than symbolic comparison.

What it knows: numbers, single small letters, \pi, + - * / \cdot \times, implicit products, ^, \frac, \sqrt,
parentheses, and (pairs, triples, ...) of these. Whatever it does not know, or might read otherwise than
math-verify does, it leaves to that.
"""

import functools
import math
import re
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | float | complex
Values = tuple[Number, ...]
"""A formula at each of POINTS; a tuple of formulas is a list of such."""

CLEARLY = 1e-3  # values that differ by more than this share of them are not equal under any rounding
SAME = 1e-12  # floats that differ by less than this share are equal
LARGEST = 10**6  # numbers in floating-point formulas; larger ones would drown others
MAX_CHARS, MAX_POWER = 200, 30

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<command>\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z]))|(?P<letter>[a-z])"
    r"|(?P<sign>[-+*/^(){},]))"
)
IGNORED = re.compile(r"\\(?:left|right)(?![A-Za-z])")
THIN_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\\[,;]\s*[0-9]{3})+(?![0-9])")
THIN = re.compile(r"(?<!\\)\\[,; ]\s*")
BACKWARDS = re.compile(r"(?<![A-Za-z\\])\\!\s*|(?<!\\)\\!\s*(?![A-Za-z])")
THOUSANDS = re.compile(r"\d,\s*\d{3}(?!\d)")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONSTANTS = {"i": 1j, "e": math.e, "\\pi": math.pi}


def without_thin_spaces(text: str) -> str:
    r"""The text without \!, with plain spaces for \, \; and "\ ", but none between groups of three digits."""
    text = BACKWARDS.sub("", text)
    return THIN.sub(" ", THIN_GROUPS.sub(lambda number: THIN.sub("", number[0]), text))


def _points() -> dict[str, Values]:
    """Name -> its value at each point: its own at the first, where two formulas may differ; then any.

    All are below 1, so that high powers do not drown the rest of a formula.
    """
    points: dict[str, Values] = {}
    for index, name in enumerate((*LETTERS, "\\pi")):
        own = CONSTANTS.get(name, Fraction(37 + 2 * index, 97))
        points[name] = (own, Fraction(31 + 2 * index, 89), Fraction(29 + 3 * index, 113))
    return points


POINTS = _points()


class Unknown(Exception):
    """The text is none of the formulas that this file knows."""


def compare(answer: str, truth: str) -> bool | None:
    """Whether two formulas are equal; None where that is not plain.

    False: their values differ where i, e and pi have theirs. True: they are equal with anything in the place
    of letters and constants, exactly or, with roots, to 12 digits.
    """
    left, right = _evaluate(answer), _evaluate(truth)
    if left is None or right is None:
        return None
    if len(left) != len(right):
        return False
    verdicts = [_same(one, other) for one, other in zip(left, right, strict=True)]
    if all(verdicts):
        return True
    # (1, 2) and (2, 1) may be meant as sets: different only if something of one is nowhere in the other
    if any(all(_differ(one[0], other[0]) for other in right) for one in left):
        return False
    return None


def _same(left: Values, right: Values) -> bool:
    for one, other in zip(left, right, strict=True):
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            if one != other:
                return False
        elif abs(one - other) > SAME * max(abs(one), abs(other)):
            return False
    return True


def _differ(left: Number, right: Number) -> bool:
    return abs(left - right) > CLEARLY * max(1, abs(left), abs(right))


@functools.lru_cache(maxsize=1 << 14)
def _evaluate(text: str) -> list[Values] | None:
    """The values of a formula, or of each part of a tuple; None for what is not known."""
    if len(text) > MAX_CHARS:
        return None
    text = without_thin_spaces(text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    if THOUSANDS.search(text):
        return None
    try:
        return _Parser(_tokens(IGNORED.sub("", text))).whole()
    except (Unknown, ArithmeticError, RecursionError):
        return None


def _tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token. Two numbers or two letters side by side are ambiguous."""
    tokens: list[tuple[str, str]] = []
    text, position = text.strip(), 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise Unknown
        kind = match.lastgroup or ""
        if tokens and tokens[-1][0] == kind and kind in ("number", "letter"):
            raise Unknown
        tokens.append((kind, match[kind]))
        position = match.end()
    return tokens


@dataclass
class _Parser:
    """Recursive descent over tokens; every rule gives the values of what it has read."""

    tokens: list[tuple[str, str]]
    position: int = 0
    has_floats: bool = False
    largest: int = 0

    def whole(self) -> list[Values]:
        """The whole text: a formula, or formulas in parentheses between commas."""
        parts = self._tuple() if self._next() == "(" and self._closes_at_end() else [self._sum()]
        if self.position != len(self.tokens) or (self.has_floats and self.largest > LARGEST):
            raise Unknown
        return parts

    def _tuple(self) -> list[Values]:
        self._take("(")
        parts = [self._sum()]
        while self._next() == ",":
            self._take(",")
            parts.append(self._sum())
        self._take(")")
        return parts

    def _closes_at_end(self) -> bool:
        depth = 0
        for index, (_, text) in enumerate(self.tokens):
            depth += (text == "(") - (text == ")")
            if depth == 0:
                return index == len(self.tokens) - 1
        return False

    def _sum(self) -> Values:
        sign = self._take() if self._next() in ("+", "-") else "+"
        total = _scaled(self._product(), sign)
        while self._next() in ("+", "-"):
            sign = self._take()
            total = tuple(a + b for a, b in zip(total, _scaled(self._product(), sign), strict=True))
        return total

    def _product(self) -> Values:
        """Factors; a quotient has two only, as nobody agrees on what 1/2x means."""
        value, previous = self._power(), self.tokens[self.position - 1]
        if self._next() == "/":
            self._take()
            below = self._power()
            if self._starts_factor() or self._next() in ("/", "*", "\\cdot", "\\times"):
                raise Unknown
            return _quotient(value, below)
        while True:
            if self._next() in ("*", "\\cdot", "\\times"):
                self._take()
            elif not self._starts_factor():
                break
            elif not self._may_be_side_by_side(previous):
                raise Unknown
            value = tuple(a * b for a, b in zip(value, self._power(), strict=True))
            previous = self.tokens[self.position - 1]
        if self._next() == "/":
            raise Unknown
        return value

    def _may_be_side_by_side(self, previous: tuple[str, str]) -> bool:
        """Not a mixed number, nor a function's name, nor a digit after another factor."""
        kind, text = self.tokens[self.position]
        if kind == "number" or (previous[0] == "number" and text == "\\frac"):
            return False
        return not (previous[0] == "letter" and text == "(")

    def _power(self) -> Values:
        base = self._atom()
        if self._next() != "^":
            return base
        self._take("^")
        exponent = self._exponent()
        return tuple(value**exponent for value in base)

    def _exponent(self) -> int:
        """A small whole number: one digit, or any in braces."""
        braced = self._next() == "{"
        if braced:
            self._take("{")
        sign = -1 if braced and self._next() == "-" and self._take() else 1
        kind, text = self._token()
        if kind != "number" or not text.isdigit() or (not braced and len(text) > 1) or int(text) > MAX_POWER:
            raise Unknown
        self.position += 1
        if braced:
            self._take("}")
        return sign * int(text)

    def _atom(self) -> Values:
        kind, text = self._token()
        if kind == "number":
            self.position += 1
            value = Fraction(text)
            self.largest = max(self.largest, math.ceil(value))
            return (value, value, value)
        if kind == "letter" or text == "\\pi":
            self.position += 1
            return POINTS[text]
        if text == "(":
            return self._inside("(", ")")
        if text == "\\frac":
            self._take()
            return _quotient(self._inside("{", "}"), self._inside("{", "}"))
        if text == "\\sqrt":
            self._take()
            self.has_floats = True
            return (_root(self._inside("{", "}")),) * 3
        raise Unknown

    def _inside(self, opening: str, closing: str) -> Values:
        self._take(opening)
        value = self._sum()
        self._take(closing)
        return value

    def _starts_factor(self) -> bool:
        if self.position == len(self.tokens):
            return False
        kind, text = self.tokens[self.position]
        return kind in ("number", "letter") or text in ("(", "\\frac", "\\sqrt", "\\pi")

    def _token(self) -> tuple[str, str]:
        if self.position == len(self.tokens):
            raise Unknown
        return self.tokens[self.position]

    def _next(self) -> str | None:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else None

    def _take(self, expected: str | None = None) -> str:
        _, text = self._token()
        if expected is not None and text != expected:
            raise Unknown
        self.position += 1
        return text


def _scaled(value: Values, sign: str) -> Values:
    return tuple(-part for part in value) if sign == "-" else value


def _quotient(above: Values, below: Values) -> Values:
    return tuple(a / b for a, b in zip(above, below, strict=True))


def _root(values: Values) -> float:
    """The root of a number; that of a letter would depend on its sign."""
    value = values[0]
    if isinstance(value, complex) or value < 0 or values != (value, value, value):
        raise Unknown
    return math.sqrt(value)
