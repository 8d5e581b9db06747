r"""The answer that a response ends with: in tags, in a box, or stated in words. Linear in its length."""

import re

from siirl.rewards.rules import boxes

END_CHARS = 500  # an answer in words is looked for at the end of the response only
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
STATED = re.compile(
    r"(?:^|[^A-Za-z])"
    r"(?:answers?|ans|results?|option|choice|(?:solutions?|roots?|zeros)(?=[ \t]+(?:is|are)\b))\b"
    r"(?:[ \t]+(?!is\b|are\b)[A-Za-z]{1,12}){0,6}[ \t]*(?:\bis\b|\bare\b|:|=|：)"
    r"(?:[ \t]*[:=：])?[ \t]*(?=(?P<answer>[^\n]*))|####[ \t]*(?=(?P<marked>[^\n]*))",
    re.IGNORECASE,
)
EMPHASIS = re.compile(r"\*\*|__")
BETWEEN = re.compile(
    r"(?:[\s$.,;:\\(){}\[\]&/|*-]|\d{1,2}[.)]|\([a-z]\)|(?<![A-Za-z])(?:or|and|also|maybe|perhaps|possibly|either|"
    r"alternatively|it|text|could|might|may|be|if|not|(?:alternative|another|other|second|possible|my|the)?\s*"
    r"(?:answer|option|choice|value)s?(?:\s+is)?(?:\s+also)?|[A-Za-z]\s*=)(?![A-Za-z]))*",
    re.IGNORECASE,
)
"""What stands between boxes that are offered together."""
SAID_AGAIN = re.compile(r"\b(?:the|my)?\s*(?:answer|value)s?(?:\s+is)?(?!\s+also)\b", re.IGNORECASE)
OFFERED = re.compile(
    r"\b(?:or|and|also|maybe|perhaps|possibly|either|alternatively|could|might|may|not|alternative|another|other|"
    r"second|possible)\b",
    re.IGNORECASE,
)
RETRACTED = re.compile(
    r"[^.!?\n]{0,80}\b(?:wrong|incorrect|mistaken|(?:not|isn't) (?:right|correct|it\b|the\b))",
    re.IGNORECASE,
)
"""What behind a box takes it back, in its sentence."""
DENIED = re.compile(
    r"\b(?:wait|hmm+|actually|no|oh|oops|sorry|hold on)\b[^.!?\n]{0,60}"
    r"\b(?:wrong|incorrect|mistaken|(?:not|isn't) (?:right|correct))\b",
    re.IGNORECASE,
)
ASKED = re.compile(r"[\s$)\\\]*]*\?")
REOPENED = re.compile(
    r"\b(?:wait|hmm+|hold on|hang on|actually|let(?: me|'s| us) (?:re|try|check|double|verify)|recompute"
    r"|recheck|(?:does|do|did|is|are)(?:n't| not)|contradict\w*|mistake|error)\b",
    re.IGNORECASE,
)
ENDED_TEXT = re.compile(r".*[.!}$)\]`*✓✔□■∎]\s*", re.DOTALL)
"""Behind a box that is doubted: it is no answer if the text is cut off before it has another."""

SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
DOUBTS = re.compile(
    r"\b(?:not|n't|don't|can't|cannot|unable|unsure|unknown|unclear|maybe|perhaps|guess|might|could|page|if)\b|\?",
    re.IGNORECASE,
)
TAKEN_BACK = re.compile(
    r"^(?:times|plus|minus|of|(?:more|less|fewer|greater|larger|smaller)\s+than)\b|\?|(?:,|\.\.\.)\s*(?:no|wait)\b"
    r"|\b(?:if|when|then|that|which|but|and|because|so|since)$",
    re.IGNORECASE,
)
"""What behind a number shows that it is not the answer, or that its sentence goes on."""
EQUATION = re.compile(r"(?:\d[A-Za-z]|[A-Za-z]\s*\^|[-+*/]\s*[A-Za-z](?![A-Za-z]))[^=]*=\s*[-+]?\d[^=]*$")
CONCLUSION = re.compile(
    r"(?:so|thus|therefore|hence|finally|consequently|altogether|in total|in conclusion)\b", re.IGNORECASE
)
HYPOTHESIS = re.compile(
    r"(?:let|suppose|assume|assuming|for|when|consider|case|given|since|where|say|try|fix|set)\b|.*\b(?:fails?|wrong)\b",
    re.IGNORECASE,
)
CHOICE = re.compile(
    r"(?:(?:option|choice)\s+)?(?P<letter>\(?[A-J]\)?)"
    r"(?: is (?:correct|right|the (?:\w+ )?(?:answer|option|choice)))?\.?",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z]{2,}")
LIST_MARK = re.compile(r"\(?\d{1,2}[.)]|[-*]\s.*|\(\d+\)")
FEW_WORDS = re.compile(r"\(?[A-Za-z][A-Za-z'-]*\)?(?: [A-Za-z'-]+){0,2}[.!]?")
FORMULA = r"\$\$[^$]+\$\$|\$[^$]+\$|\\\((?:(?!\\\)).)+\\\)|\\\[(?:(?!\\\]).)+\\\]"
FORMULAS = re.compile(rf"(?:{FORMULA})(?:\s*(?:,|or|and|,\s*or|,\s*and)\s*(?:{FORMULA}))*")
NUMBER = r"[-+]?\\?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?"
UNIT = (
    r"\s+(?!(?:so|that|the|and|from|then|we|which|if|to|in|by|is|as|or|but|because|since|when|for|with|a|an|at|on|"
    r"was|are|were|has|have|had|times|plus|minus|more|less)\b|of\s*[.!]?$)[A-Za-z-]+(?:\^?\{?\d\}?)?"
)
ENDED = r"(?:\s+[A-Za-z][A-Za-z'’-]*,?){0,12}[.!]"
CONCLUDED = re.compile(
    r"(?:=|\b(?:is|are|was|were|be|equals?|gets?|gives?|gave|obtain|makes?|leaves?|costs?|has|have|had|earns?|"
    r"spends?|needs?|pays?|takes?(?: (?:him|her|them|it|us|me))?|total of|equal to|comes to)\b)"
    r"\s*(?:(?:exactly|about|only|just)\s+)?"
    rf"(?P<answer>{FORMULA}|{NUMBER})(?:(?:{UNIT}){{0,4}}\s*[.!]?|{ENDED})$"
)
THEREFORE = re.compile(
    rf"(?:^|,\s*)(?:so|thus|therefore|hence|finally|consequently)\b.*?(?P<answer>{FORMULA})\s*[.!]?$",
    re.IGNORECASE,
)
BARE = re.compile(
    rf"(?:(?:^|\s*(?:,|or|and)\s+)(?:[A-Za-z]\s*=|=)?\s*"
    rf"(?:(?:{FORMULA}|{NUMBER})(?:{UNIT})?|\\[dt]?frac\{{[^{{}}]+\}}\{{[^{{}}]+\}}))+[.!]?$"
)
WORDS = re.compile(r"\s+(?=\(?[A-Za-z]{2,})")
FILLER = re.compile(
    r"^(?:(?:approximately|about|simply|just|exactly|equal to|therefore|thus)\s+)+", re.IGNORECASE
)
IN_BRACES = re.compile(r"\{[^{}]*\}")
SPACING = re.compile(r"(?:\\\\|\\[,;: ]|\s)+$")
PERCENT = re.compile(r"percent\b", re.IGNORECASE)
HALF_OF_A_DAY = re.compile(r"[ap]\.?m\b", re.IGNORECASE)
MOST_WORDS = 6  # behind an answer whose sentence has no end


def tagged_answer(text: str) -> str | None:
    """What the last <answer>...</answer> holds; None without one."""
    found = TAGGED.findall(text)
    return found[-1].strip() if found else None


def boxed_answer(text: str) -> str | None:
    r"""What the last \boxed{...} holds; several that are offered together, as "1, 2". None if one is open."""
    closed, is_open = boxes(text)
    if is_open or not closed or re.search(r"\\boxed\s*$", text):
        return None
    behind = text[closed[-1].end + 1 :]
    doubted = ASKED.match(behind) or REOPENED.search(behind)
    if RETRACTED.match(behind) or DENIED.search(behind) or (doubted and not ENDED_TEXT.fullmatch(behind)):
        return None
    chosen = [closed[-1]]
    for box in reversed(closed[:-1]):
        between = text[box.end + 1 : chosen[0].start]
        if not BETWEEN.fullmatch(between) or (SAID_AGAIN.search(between) and not OFFERED.search(between)):
            break
        chosen.insert(0, box)
    return ", ".join(dict.fromkeys(text[box.inner : box.end].strip() for box in chosen))


def stated_answer(text: str) -> str | None:
    """What follows the last "answer:", "answer is", "####" in its line; None without it, or unfinished."""
    found = list(STATED.finditer(EMPHASIS.sub("", text[-END_CHARS:])))
    return None if not found else finished(found[-1]["answer"] or found[-1]["marked"] or "")


def concluded_answer(text: str) -> str | None:
    """The number or formula that is the last line, or with which the last sentence ends; None otherwise."""
    end = EMPHASIS.sub("", text[-END_CHARS:]).strip()
    lines = [line.strip() for line in SENTENCES.split(end) if line.strip()]
    last, line = lines[-1] if lines else "", end.rpartition("\n")[2]
    if len(lines) > 1 and LIST_MARK.fullmatch(last):
        return None
    if BARE.fullmatch(last):
        return None if DOUBTS.search(line) else finished(last)
    if choice := CHOICE.fullmatch(line):
        return choice["letter"]
    if len(lines) == 1 and FEW_WORDS.fullmatch(line) and not DOUBTS.search(line):
        return line.rstrip(".!")
    ended = last.endswith((".", "!")) or len(lines) == 1 or CONCLUSION.match(last) or not WORD.search(last)
    if not ended or any(kind.search(last) for kind in (DOUBTS, EQUATION)) or HYPOTHESIS.match(last):
        return None
    found = CONCLUDED.search(last) or THEREFORE.search(last)
    if not found:
        return None
    price = last.endswith((".", "!")) and re.fullmatch(r"\\?\$([^$]*)", found["answer"])
    return finished(price[1] if price else found["answer"])


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
    answer = SPACING.sub("", sentence[0][:-1] if sentence else text).strip()
    if (
        answer.count("{") != answer.count("}")
        or (answer.count("$") - answer.count(r"\$")) % 2
        or answer[-1:] in tuple("+-*/=^(,\\_&")
        or re.fullmatch(r"[-+]?\d+\.+", answer)
    ):
        return None
    if not answer or (not sentence and len(WORDS.split(IN_BRACES.sub("", answer))) > MOST_WORDS):
        return None
    first, *rest = _before_words(answer)
    if rest and PERCENT.match(rest[0]):
        return f"{first}%"
    if rest and (half := HALF_OF_A_DAY.match(rest[0])):
        return f"{first} {half[0]}"
    if re.search(r"\d", first) and (TAKEN_BACK.search(" ".join(rest)) or TAKEN_BACK.search(text)):
        return None
    if rest and re.match(r"(?:or|and)\b.*\d", rest[0]):
        return re.sub(r"\s*\b(?:or|and)\b\s*", ", ", answer)
    return first if rest and re.search(r"\d", first) else answer


def _before_words(answer: str) -> list[str]:
    """An answer and the words behind it, [answer] without words; those within braces are the answer's own."""
    for space in WORDS.finditer(answer):
        if answer.count("{", 0, space.start()) == answer.count("}", 0, space.start()):
            return [answer[: space.start()], answer[space.end() :]]
    return [answer]
