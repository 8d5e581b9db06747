"""Mathematical answers compared as texts, where that settles it: numbers, words, choices. No mathematics."""

import re
from fractions import Fraction
from typing import Any

CLEARLY = 1e-3  # values that differ by more than this share of them are not equal under any rounding
# a space next to a comma or a point may mean something: "7,282" is one number, "7, 282" are two
NO_MEANING = re.compile(r"\\(?:left|right)(?![A-Za-z])|(?<![0-9A-Za-z,.])\s+|\s+(?![0-9A-Za-z,.])")
NOTHING = re.compile(
    r"(?:\\(?:boxed|fbox|text|mathrm|mbox|left|right|quad|qquad)(?![A-Za-z])|\\[,;:! ]|[\s{}$~.,])*"
)
DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,2})?")
SCIENTIFIC = re.compile(
    r"(?:(?P<factor>[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:\\times|\\cdot|\*|×)\s*)?10\s*\^\s*\{?(?P<power>[+-]?[0-9]{1,2})\}?"
)
REPEATING = re.compile(
    r"(?P<sign>-?)(?P<whole>[0-9]{0,20})\.(?P<fixed>[0-9]{0,20})"
    r"\\(?:overline|bar|dot)\s*(?:\{(?P<turns>[0-9]{1,20})\}|(?P<turn>[0-9]))(?:\.\.\.|\\[lc]?dots)?"
)
FRACTION = re.compile(
    r"(?P<sign>-?)(\\[dt]?frac\{(?P<n1>[0-9]{1,30})\}\{(?P<d1>[0-9]{1,30})\}"
    r"|(?P<n2>[0-9]{1,30})/(?P<d2>[0-9]{1,30}))"
)
MIXED = re.compile(r"(?P<sign>-?)(?P<whole>[0-9]{1,20})(?:\s+(?P<part>[0-9]{1,20})/(?P<of>[0-9]{1,20}))")
GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
THIN_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\\[,;]\s*[0-9]{3})+(?![0-9])")
THIN = re.compile(r"(?<!\\)\\[,; ]\s*")
BACKWARDS = re.compile(r"(?<![A-Za-z\\])\\!\s*|(?<!\\)\\!\s*(?![A-Za-z])")
IN_MATH = re.compile(r"\$+([^$]*)\$+|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
FONT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boxed|bf|rm)\s*\{([^{}]*)\}")
PERCENT = re.compile(r"(.*?)\s*\\?%|(.*?)\s*(?:\\text\{)?\s*percent\s*\}?", re.DOTALL)
IN_BASE = re.compile(r"([0-9A-Z]{1,40})_\{?(?:\\text\{)?([0-9]{1,2}|two|three|eight|sixteen)\}{0,2}")
BASES = {"two": 2, "three": 3, "eight": 8, "sixteen": 16}
RESIDUE = re.compile(r"(?P<residue>.*?)\s*(?:\\p?mod|\(\\?(?:mod|bmod))\s*(?P<modulus>[^()]*?)\)?", re.DOTALL)
LETTER = re.compile(r"\(?([A-J])\)?(?:[.:)]?\s*|(?:[.:]|(?<=\)))\s*(?P<rest>.+))", re.DOTALL)
PHRASE = re.compile(r"[A-Za-z][A-Za-z' -]+")


def tidy(answer: str) -> str:
    """The answer without what a writer puts around it: dollars, a font of the whole, a full stop."""
    text = answer.strip()
    while True:
        inner = IN_MATH.fullmatch(text)
        font = FONT.fullmatch(text)
        if inner:
            text = next(part for part in inner.groups() if part is not None)
        elif font:
            text = font[1]
        else:
            text = (
                re.sub(r"(?:[\s.,;:]|\\\\|(?<!\\)\\[,;: ])+$", "", text) if not text.endswith("...") else text
            )
            return text.strip()
        text = text.strip()


def compare_text(answer: str, truth: str) -> bool | None:
    """Whether tidy texts are equal, when that is plain without mathematics; None when it needs some."""
    if answer == truth or _canonical(answer) == _canonical(truth):
        return True
    one, other = _percent(answer), _percent(truth)
    if (one is None) != (other is None):
        return _compare_percent(one or answer, other or truth)
    answer, truth = one or answer, other or truth
    left, right = rational(answer), rational(truth)
    if left is not None and right is not None:
        return compare_values(left, right)
    if (based := _compare_based(answer, truth)) is not None:
        return based
    if chosen := LETTER.fullmatch(_plain(truth)):
        given = LETTER.fullmatch(_plain(answer))
        if given is not None:
            return given[1] == chosen[1]
    if PHRASE.fullmatch(words := _plain(truth)) and PHRASE.fullmatch(said := _plain(answer)):
        return " ".join(said.lower().split()) == " ".join(words.lower().split())
    return None


def residue_of(text: str) -> tuple[str, str]:
    r"""(3, 7) of "x \equiv 3 \\pmod{7}"; the modulus is "" where there is none."""
    found = RESIDUE.fullmatch(text)
    if found is None:
        return text, ""
    return found["residue"].rpartition(r"\equiv")[2].strip(), found["modulus"].strip("{} ")


def labelled(answer: str) -> str | None:
    """What an answer says behind the letter of a choice: 12 of "B. 12" and "(B) 12"; else None."""
    found = LETTER.fullmatch(_plain(answer))
    return found["rest"] if found else None


def _plain(text: str) -> str:
    return FONT.sub(r"\1", text).replace("~", " ").strip()


def _canonical(text: str) -> str:
    """The text without what has no meaning in a formula: spaces around signs, sizes."""
    text = NO_MEANING.sub("", _without_thin_spaces(text))
    return text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")


def _without_thin_spaces(text: str) -> str:
    r"""The text without \!, with plain spaces for \, \; and "\ ", but none between groups of three digits."""
    text = BACKWARDS.sub("", text)
    return THIN.sub(" ", THIN_GROUPS.sub(lambda number: THIN.sub("", number[0]), text))


def rational(text: str) -> Fraction | None:
    """The value of a number that is written in digits, or of a fraction of integers; else None."""
    if match := FRACTION.fullmatch(text):
        sign, numerator, denominator = match["sign"], match["n1"] or match["n2"], match["d1"] or match["d2"]
        return Fraction(f"{sign}{numerator}/{denominator}") if int(denominator) else None
    if match := REPEATING.fullmatch(text):
        turns, fixed = match["turns"] or match["turn"], match["fixed"]
        value = Fraction(int((match["whole"] or "0") + fixed), 10 ** len(fixed))
        value += Fraction(int(turns), (10 ** len(turns) - 1) * 10 ** len(fixed))
        return -value if match["sign"] else value
    if match := SCIENTIFIC.fullmatch(text):
        return Fraction(match["factor"] or 1) * Fraction(10) ** int(match["power"])
    if match := MIXED.fullmatch(text):
        value = int(match["whole"]) + Fraction(f"{match['part']}/{match['of']}") if int(match["of"]) else None
        return -value if value is not None and match["sign"] else value
    if GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return Fraction(text) if DECIMAL.fullmatch(text) else None


def compare_values(left: Any, right: Any) -> bool | None:
    """Equality of two numbers; None when they are so close that it is a matter of rounding."""
    if left == right:
        return True
    return False if abs(left - right) > CLEARLY * max(1, abs(left), abs(right)) else None


def _percent(text: str) -> str | None:
    """What stands before a percent sign; None without one."""
    found = PERCENT.fullmatch(text)
    return next((part for part in found.groups() if part is not None), None) if found else None


def _compare_percent(one: str, other: str) -> bool | None:
    """Equality where one of the two has a percent sign: 50% is 50, where percents are asked, or 0.5."""
    left, right = rational(one), rational(other)
    if left is None or right is None:
        return None
    return left == right or left == 100 * right or right == 100 * left


def _compare_based(answer: str, truth: str) -> bool | None:
    """Equality where one of the two is written in a base; None where none is."""
    values = []
    for text in (answer, truth):
        found = IN_BASE.fullmatch(re.sub(r"\s", "", text))
        base = int(BASES.get(found[2], found[2])) if found else 10
        digits = found[1] if found else re.sub(r"[\s,]", "", text)
        if not digits.isalnum() or not 2 <= base <= 36:
            return None
        values.append((found is not None, digits, base))
    if not any(written for written, _, _ in values):
        return None
    try:
        return int(values[0][1], values[0][2]) == int(values[1][1], values[1][2])
    except ValueError:
        return False
