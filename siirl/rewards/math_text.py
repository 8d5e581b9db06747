"""Mathematical answers compared as texts, where that settles it: numbers as people write them (digits,
groups, powers of ten, repeating, fractions, percents, bases), words, choices. No mathematics.
"""

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


# a space next to a comma or a point may mean something: "7,282" is one number, "7, 282" are two
NO_MEANING = re.compile(r"\\(?:left|right)(?![A-Za-z])|(?<![0-9A-Za-z,.])\s+|\s+(?![0-9A-Za-z,.])")
NOTHING = re.compile(
    r"(?:\\(?:boxed|fbox|text|mathrm|mbox|left|right|quad|qquad)(?![A-Za-z])|\\[,;:! ]|[\s{}$~.,])*"
)
THIN_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\\[,;]\s*[0-9]{3})+(?![0-9])")
THIN = re.compile(r"(?<!\\)\\[,; ]\s*")
BACKWARDS = re.compile(r"(?<![A-Za-z\\])\\!\s*|(?<!\\)\\!\s*(?![A-Za-z])")
IN_MATH = re.compile(r"\$+([^$]*)\$+|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
FONT = re.compile(
    r"(?:\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boxed|bf|rm|large|Large|displaystyle)"
    r"|\\(?:text)?color\s*\{\w+\})\s*\{([^{}]*)\}"
)
COLOUR = re.compile(r"\\(?:text)?color\s*\{\w+\}\s*(?=\{)")
CURRENCY = r"(?:\\text\s*\{\s*\\?\$\s*\}|\\?\$|€|£|¥|(?:USD|EUR|GBP|Rs\.?)(?![A-Za-z]))"
PRICE = re.compile(rf"{CURRENCY}\s*(?P<after>[0-9].*)|(?P<before>.*[0-9])\s*{CURRENCY}", re.DOTALL)
SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "°": r"^\circ",
        "∞": r"\infty",
        "π": r"\pi ",
    }
    | {"²": "^2", "³": "^3", "×": r"\times "}
)
ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
ORDINAL = re.compile(
    r"(?<=\d)(?:\^\s*\{?\s*\\(?:text|mathrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?|st|nd|rd|th)$"
)
CALLED = re.compile(
    r"(?:\\text\s*\{)?\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*[:=]?\s*\}?\s*(?=\S)", re.IGNORECASE
)
SAME = (
    (r"\varnothing", r"\emptyset"),
    ("{:}", ":"),
    (r"\{\}", r"\emptyset"),
    (r"\langle", "("),
    (r"\rangle", ")"),
)
NO_SOLUTION = re.compile(
    r"(?:(?:there\s+)?(?:is|are|has|have)\s+)?no\s+(?:(?:real|integer|such|possible|valid|positive)\s+)*"
    r"(?:solutions?|roots?|values?|zeros?|zeroes)(?:\s+exists?)?|(?:the\s+)?empty\s+set",
    re.IGNORECASE,
)
"""What stands for the empty set."""
SAID_BEFORE = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{\s*(?![^{}]*\b(?:than|least|most|about|approximately|not|no|between|or)\b)"
    r"(?:[A-Za-z' ]+\b(?:is|are|was|were|has|have|equals|makes|total(?:s|\sof)?)|[A-Za-z' ]+[:=])"
    r"\s*\}\s*(?=[-+0-9\\$])"
)
AND = re.compile(
    r"(?:\s|\\[,; ])*,?(?:\s|\\[,; ])*"
    r"\\(?:text|mathrm|mbox)\s*\{\s*,?\s*and\s*\}(?:\s|\\[,; ])*"
)
DEGREES = re.compile(
    r"\\(?P<name>sin|cos|tan|cot|sec|csc)\s*[({]?\s*(?P<angle>[0-9]+(?:\.[0-9]+)?)"
    r"\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?"
)
SET_OF = re.compile(
    r"\\?\{\s*[A-Za-z]\s*(?:\\in\s*\\(?:mathbb\s*\{?\s*R\s*\}?|R)\s*)?"
    r"(?::|\\mid|\||\\vert)\s*(?P<holds>.+?)\s*\\?\}"
)
RESIDUE = re.compile(
    r"(?P<residue>.*?)\s*(?:\\[pb]?mod|\(\s*\\?b?mod|(?<=\s)mod)(?![A-Za-z])\s*(?P<modulus>[^()]*?)\)?",
    re.DOTALL,
)
LETTER = re.compile(r"[(\[]?([A-J])[)\]]?(?:[.:)]?\s*|(?:[.:]|(?<=[)\]]))\s*(?P<rest>.+))", re.DOTALL)
OPTION = re.compile(r"(?:option|choice)s?\s+(?=\(?[A-J]\b)", re.IGNORECASE)
PHRASE = re.compile(r"[A-Za-z][A-Za-z' -]+")
ARTICLE = re.compile(r"(?:an?|the)\s+(?=\S)")
MEASURED = re.compile(
    r"(?P<value>.*?)[\s~]*\\(?:text|mathrm|mbox)\s*\{[\s~]*(?P<unit>[A-Za-z]+)\.?\s*\}", re.DOTALL
)
UNITS = {
    spelt: names.split()[0]
    for names in (
        *(
            "mm millimeter millimeters",
            "cm centimeter centimeters",
            "m meter meters",
            "km kilometer kilometers",
        ),
        *("in inch inches", "ft foot feet", "yd yard yards", "mi mile miles", "mg milligram milligrams"),
        *(
            "g gram grams",
            "kg kilogram kilograms",
            "lb pound pounds",
            "oz ounce ounces",
            "ml milliliter milliliters",
        ),
        *(
            "l liter liters",
            "s sec second seconds",
            "min minute minutes",
            "h hr hour hours",
            "day days",
            "week weeks",
        ),
        *("month months", "year years", "cent cents", "dollar dollars", "degree degrees", "radian radians"),
    )
    for spelt in names.split()
}
"""Units -> one name of each: 10 cm is right for 10, and wrong for 10 m."""

RELATION = r"\\(?:leqslant|geqslant|leq?|geq?|lt|gt|neq?)(?![A-Za-z])|<=|>=|!=|<|>"
RELATED = re.compile(rf"[^=<>\\]*(?:\\(?!leq?|geq?|lt|gt|neq?)[A-Za-z]+[^=<>\\]*)*(?:{RELATION})")
BETWEEN = re.compile(
    rf"(?P<low>.+?)\s*(?P<one>{RELATION})\s*(?P<name>[A-Za-z])\s*(?P<two>{RELATION})\s*(?P<high>.+)"
)
BOUND = re.compile(
    rf"(?P<name>[A-Za-z])\s*(?P<sign>{RELATION})\s*(?P<value>.+)|(?P<low>[^A-Za-z]+?)\s*(?P<turned>{RELATION})\s*[A-Za-z]"
)
UNSURE = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\b(?:or|not|wrong|maybe|perhaps|unsure)\b")
UNFINISHED = re.compile(r"(?:(?<!\^)(?<!\^\{)[-+*/=^]|\\(?:times|cdot|div|frac|sqrt|pm))\s*$")


def tidy(answer: str) -> str:
    """The answer without what a writer puts around it: dollars, a font of the whole, a full stop."""
    text = ROOT.sub(r"\\sqrt{\1\2}", COLOUR.sub("", answer.translate(SIGNS))).strip()
    for written, meant in SAME:
        text = text.replace(written, meant)
    while True:
        inner = IN_MATH.fullmatch(text)
        font = FONT.fullmatch(text)
        price = PRICE.fullmatch(text)
        if inner:
            text = next(part for part in inner.groups() if part is not None)
        elif font:
            text = font[1]
        elif price:
            text = price["after"] or price["before"]
        else:
            text = (
                re.sub(r"(?:[\s.,;:]|\\\\|(?<!\\)\\[,;: ])+$", "", text) if not text.endswith("...") else text
            )
            text = CALLED.sub("", OPTION.sub("", ORDINAL.sub("", text.strip()), count=1), count=1)
            return _in_symbols(text)
        text = text.strip()


def _in_symbols(text: str) -> str:
    """With symbols for words: those before a value, an "and" of a list, no solution, degrees of an angle."""
    if NO_SOLUTION.fullmatch(" ".join(_plain(text).split())):
        return r"\emptyset"
    text = AND.sub(", ", SAID_BEFORE.sub("", text, count=1))
    return DEGREES.sub(r"\\\g<name>(\\frac{\g<angle>\\pi}{180})", text)


def compare_text(answer: str, truth: str) -> bool | None:
    """Whether tidy texts are equal, when that is plain without mathematics; None when it needs some."""
    if answer == truth or _canonical(answer) == _canonical(truth) or _flat(answer) == _flat(truth):
        return True
    if UNFINISHED.search(answer) or _contradict(answer, truth):
        return False
    one, other = of_percent(answer), of_percent(truth)
    if one is not None and other is None:
        return compare_percent(one, truth)
    if one is None and other is not None:
        return compare_percent(other, answer)
    answer, truth = one or answer, other or truth
    left, right = rational(answer), rational(truth)
    if left is not None and right is not None:
        return compare_values(left, right)
    if (based := compare_based(answer, truth)) is not None:
        return based
    if chosen := LETTER.fullmatch(_plain(truth)):
        given = LETTER.fullmatch(_plain(answer))
        if given is not None:
            return given[1] == chosen[1]
    if PHRASE.fullmatch(words := _plain(truth)) and PHRASE.fullmatch(said := _plain(answer)):
        return _words(said) == _words(words)
    return None


def _contradict(answer: str, truth: str) -> bool:
    """Whether two texts say things of different kinds: 10 m for 10 cm, x > 6 or "6 or so" for 6."""
    one, other = MEASURED.fullmatch(answer), MEASURED.fullmatch(truth)
    if one and other:
        units = [UNITS.get(found["unit"].lower()) for found in (one, other)]
        if None not in units and units[0] != units[1]:
            return True
    if rational(truth) is not None and UNSURE.search(answer):
        return True
    related, wanted = (bool(RELATED.match(text)) for text in (answer, truth))
    return related and not wanted and rational(truth) is not None


def as_interval(text: str) -> str | None:
    r"""The interval that an inequality in one letter says: (0, 1] of "0 < x \le 1"; else None."""
    if found := SET_OF.fullmatch(text):
        text = found["holds"]
    parts = re.split(r"\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*or\s*\}|\\(?:lor|vee)|\bor\b)\s*", text)
    intervals = [_one_interval(part.strip()) for part in parts]
    return None if None in intervals else r" \cup ".join(filter(None, intervals))


def _one_interval(text: str) -> str | None:
    if found := BETWEEN.fullmatch(text):
        one, two = _sign(found["one"]), _sign(found["two"])
        if one[0] != two[0] or one[0] == "!":
            return None
        ends = [(found["low"], one), (found["high"], two)]
        (low, opens), (high, closes) = ends if one[0] == "<" else reversed(ends)
    elif found := BOUND.fullmatch(text):
        sign, value = _sign(found["sign"] or found["turned"]), found["value"] or found["low"]
        if sign[0] == "!":
            return None
        above = (sign[0] == ">") == (found["sign"] is not None)
        (low, opens), (high, closes) = (
            ((value, sign), (r"\infty", "<")) if above else ((r"-\infty", "<"), (value, sign))
        )
    else:
        return None
    return f"{'[' if opens[1:] else '('}{low.strip()},{high.strip()}{']' if closes[1:] else ')'}"


def _sign(relation: str) -> str:
    r"""One of < <= > >= != for any way to write it."""
    name = relation.strip("\\")
    if name[0] in "<>!":
        return name
    return (
        "!="
        if name.startswith("n")
        else ("<" if name.startswith("l") else ">") + ("=" if name[1] == "e" else "")
    )


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
    return OPTION.sub("", FONT.sub(r"\1", text).replace("~", " ").strip(), count=1)


def _words(text: str) -> str:
    return ARTICLE.sub("", " ".join(text.lower().split()), count=1)


def _canonical(text: str) -> str:
    """The text without what has no meaning in a formula: spaces around signs, sizes."""
    text = NO_MEANING.sub("", _without_thin_spaces(text))
    return text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")


def _flat(text: str) -> str:
    """The text without fonts: 3:40 PM of "3:40 \\text{ PM}"."""
    return _canonical(" ".join(_plain(text).split()))


def _without_thin_spaces(text: str) -> str:
    r"""The text without \!, with plain spaces for \, \; and "\ ", but none between groups of three digits."""
    text = BACKWARDS.sub("", text)
    return THIN.sub(" ", THIN_GROUPS.sub(lambda number: THIN.sub("", number[0]), text))
