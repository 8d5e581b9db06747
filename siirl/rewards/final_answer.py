r"""The answer that a response ends with: in tags, in a box, or stated in words. Linear in its length."""

import re

from siirl.rewards.rules import boxes

END_CHARS = 500  # an answer in words is looked for at the end of the response only
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
STATED = re.compile(
    r"(?:^|[^A-Za-z])(?:answers?|option|choice)\b"
    r"(?:[ \t]+(?!is\b|are\b)[A-Za-z]{1,12}){0,6}[ \t]*(?:\bis\b|\bare\b|:|=|：)"
    r"(?:[ \t]*[:=：])?[ \t]*(?=(?P<answer>[^\n]*))|####[ \t]*(?=(?P<marked>[^\n]*))",
    re.IGNORECASE,
)
EMPHASIS = re.compile(r"\*\*|__")
BETWEEN = re.compile(
    r"(?:[\s$.,;:\\()\[\]&/|*]|(?<![A-Za-z])(?:or|and|also|maybe|perhaps|possibly|either|alternatively|it|"
    r"could|might|may|be|[A-Za-z]\s*=)(?![A-Za-z]))*",
    re.IGNORECASE,
)
"""What stands between boxes that are offered together."""

SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
DOUBTS = re.compile(
    r"\b(?:not|n't|don't|can't|cannot|unsure|unknown|unclear|maybe|perhaps|guess|might|could|page|if)\b|\?",
    re.IGNORECASE,
)
FORMULA = r"\$[^$]+\$|\\\((?:(?!\\\)).)+\\\)|\\\[(?:(?!\\\]).)+\\\]"
FORMULAS = re.compile(rf"(?:{FORMULA})(?:\s*(?:,|or|and|,\s*or|,\s*and)\s*(?:{FORMULA}))*")
NUMBER = r"[-+]?\\?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?"
UNIT = (
    r"\s+(?!(?:so|that|the|and|from|then|we|which|if|to|in|by|is|as|or|but|because|since|when)\b)[A-Za-z-]+"
)
ENDED = r"(?:\s+[A-Za-z][A-Za-z'’-]*,?){0,12}[.!]"
CONCLUDED = re.compile(
    r"(?:=|\b(?:is|are|was|were|be|equals?|gets?|gives?|gave|obtain|makes?|leaves?|costs?|has|have|had|earns?|"
    r"spends?|needs?|pays?|total of|equal to|comes to)\b)\s*(?:(?:exactly|about|only|just)\s+)?"
    rf"(?P<answer>{FORMULA}|{NUMBER})(?:(?:{UNIT}){{0,4}}\s*|{ENDED})$"
)
THEREFORE = re.compile(
    rf"(?:so|thus|therefore|hence|finally|consequently)\b.*?(?P<answer>{FORMULA})\s*[.!]?$", re.IGNORECASE
)
BARE = re.compile(
    rf"(?:[A-Za-z]\s*=\s*)?(?:{FORMULA}|{NUMBER}|\\[dt]?frac\{{[^{{}}]+\}}\{{[^{{}}]+\}})[.!]?$"
)
WORDS = re.compile(r"\s+(?=[A-Za-z]{2,})")
FILLER = re.compile(
    r"^(?:(?:approximately|about|simply|just|exactly|equal to|therefore|thus)\s+)+", re.IGNORECASE
)
MOST_WORDS = 6  # behind an answer whose sentence has no end


def tagged_answer(text: str) -> str | None:
    """What the last <answer>...</answer> holds; None without one."""
    found = TAGGED.findall(text)
    return found[-1].strip() if found else None


def boxed_answer(text: str) -> str | None:
    r"""What the last \boxed{...} holds; several that are offered together, as "1, 2". None if one is open."""
    closed, is_open = boxes(text)
    if is_open or not closed:
        return None
    chosen = [closed[-1]]
    for box in reversed(closed[:-1]):
        if not BETWEEN.fullmatch(text, box.end + 1, chosen[0].start):
            break
        chosen.insert(0, box)
    return ", ".join(dict.fromkeys(text[box.inner : box.end].strip() for box in chosen))


def stated_answer(text: str) -> str | None:
    """What follows the last "answer:", "answer is", "####" in its line; None without it, or unfinished."""
    found = list(STATED.finditer(EMPHASIS.sub("", text[-END_CHARS:])))
    return None if not found else finished(found[-1]["answer"] or found[-1]["marked"] or "")


def concluded_answer(text: str) -> str | None:
    """The number or formula that is the last line, or with which the last sentence ends; None otherwise."""
    lines = [line for line in SENTENCES.split(EMPHASIS.sub("", text[-END_CHARS:]).strip()) if line.strip()]
    last = lines[-1].strip() if lines else ""
    if BARE.fullmatch(last):
        return finished(last)
    found = None if DOUBTS.search(last) else CONCLUDED.search(last) or THEREFORE.match(last)
    if not found:
        return None
    price = found["answer"].startswith("$") and last.endswith((".", "!")) and found["answer"].count("$") == 1
    return finished(found["answer"].removeprefix("$") if price else found["answer"])


def marked_answer(text: str) -> str | None:
    r"""The last answer that is marked as one: in tags, in \boxed, else stated; None without a mark."""
    for found in (tagged_answer(text), boxed_answer(text), stated_answer(text)):
        if found is not None:
            return found
    return None


def finished(text: str) -> str | None:
    """The answer with which a line begins, without its sentence; None if it is cut off."""
    text = FILLER.sub("", text.strip())
    if formulas := FORMULAS.match(text):
        return ", ".join(part.strip("$") for part in re.findall(FORMULA, formulas[0]))
    sentence = re.match(r".*?[.!](?=\s|$)", text, re.DOTALL)
    answer = (sentence[0][:-1] if sentence else text).strip()
    if (
        answer.count("{") != answer.count("}")
        or answer.count("$") % 2
        or answer[-1:] in tuple("+-*/=^(,\\_&")
    ):
        return None
    if not answer or (not sentence and len(answer.split()) > MOST_WORDS):
        return None
    first, *rest = WORDS.split(answer, maxsplit=1)
    if rest and re.match(r"(?:or|and)\b.*\d", rest[0]):
        return re.sub(r"\s*\b(?:or|and)\b\s*", ", ", answer)
    return first if rest and re.search(r"\d", first) else answer
