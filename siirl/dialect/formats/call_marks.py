"""Calls between marks: where one begins and ends in a turn, what is an error, what is mere talk of marks.

A body reads what stands behind a begin mark, and raises Malformed in words for the model. Positions only
grow, and what is looked for ahead is remembered: a turn is read in about linear time, whatever is in it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    as_text: bool = False
    """The values are texts, to be read by the tool's schema: see literals.from_texts."""
    id: str | None = None
    """What the model itself calls it, in formats that write an id."""


@dataclass(frozen=True)
class MalformedCall:
    """What the model meant as a call, and why it is none: in words for the model."""

    reason: str


Call = ToolCall | MalformedCall


def called(name: str, arguments: dict[str, Any], as_text: bool = False, known: str | None = None) -> Call:
    """A call, unless its name is none. known: its id."""
    name = name.strip()
    if not name or len(name) > LONGEST_NAME:
        return MalformedCall("the call has no name" if not name else "the name of the call is too long")
    return ToolCall(name, arguments, as_text, known)


LONGEST_NAME = 1000


@dataclass(frozen=True)
class Parsed:
    """A turn taken apart."""

    content: str
    """Its text without calls, and without marks that a format sets around text."""
    calls: tuple[Call, ...] = ()
    """In the order in which they were written."""


class Malformed(Exception):
    """A body that is none; its text is the reason. at: as far as it could be read; -1: unknown."""

    def __init__(self, reason: str, at: int = -1):
        super().__init__(reason)
        self.at = at


@dataclass
class Turn:
    """The text of a turn, and what was found ahead in it."""

    text: str
    _ahead: dict[str | re.Pattern[str], tuple[int, int]] = field(default_factory=dict)

    def find(self, mark: str | re.Pattern[str], at: int) -> int:
        """Where a mark, or what matches it, begins at or behind `at`; -1 if nowhere."""
        since, found = self._ahead.get(mark, (len(self.text) + 1, -1))
        if since > at or -1 < found < at:
            if isinstance(mark, str):
                found = self.text.find(mark, at)
            else:
                match = mark.search(self.text, at)
                found = match.start() if match else -1
            self._ahead[mark] = (at, found)
        return found

    def skip(self, at: int) -> int:
        """Behind the blanks that stand at `at`."""
        match = BLANKS.match(self.text, at)
        return match.end() if match else at

    def expect(self, mark: str, at: int, why: str) -> int:
        """Behind the mark that stands at `at`; else Malformed."""
        if not self.text.startswith(mark, at):
            raise Malformed(why)
        return at + len(mark)

    def until(self, mark: str, at: int, what: str) -> tuple[str, int]:
        """The text up to a mark, and the position behind it; else Malformed. what: what the mark closes."""
        end = self.find(mark, at)
        if end < 0:
            raise Malformed(f"{what} is not closed by {mark}")
        return self.text[at:end], end + len(mark)


BLANKS = re.compile(r"\s*")
Body = Callable[[Turn, int], tuple[list[Call], int]]
"""(turn, behind the begin mark) -> calls, behind the body. Malformed if it is none."""


@dataclass(frozen=True)
class Marks:
    """A begin mark, what follows it, and an end mark ("": the body says where it ends)."""

    begin: str
    end: str
    body: Body
    looks: re.Pattern[str] = re.compile(r"\s*[\[{]")
    """What a body begins with: a mark before it is no mere talk."""
    is_part: bool = False
    """The begin mark alone says nothing: only with what `looks`, or an end mark, it is meant."""
    may_end_open: bool = False
    """A model may end its turn by the end mark, which is then dropped as its stop."""
    is_section: bool = False
    """The calls within have marks of their own: those that are whole count, whatever comes behind them."""

    def read(self, turn: Turn, at: int) -> tuple[list[Call], int]:
        """The calls behind a begin mark that ends at `at`, and where the text goes on."""
        calls: list[Call] = []
        try:
            calls, end = self.body(turn, at)
            if not self.end:
                return calls, end
            behind = turn.skip(end)
            if turn.text.startswith(self.end, behind):
                return calls, behind + len(self.end)
            if self.may_end_open and behind == len(turn.text):
                return calls, behind
            problem = f"there is text between the call and {self.end}"
        except Malformed as error:
            problem = str(error)
        calls = calls if self.is_section else []
        if not self.end:
            following = turn.find(self.begin, at)
            return [MalformedCall(problem)], len(turn.text) if following < 0 else following
        close = turn.find(self.end, at)
        if close >= 0:
            return [*calls, MalformedCall(problem)], close + len(self.end)
        if not calls or isinstance(calls[-1], ToolCall):
            calls = [*calls, MalformedCall(f"{self.begin} is not closed by {self.end}")]
        return calls, len(turn.text)

    def is_talk(self, turn: Turn, start: int) -> bool:
        """Whether the begin mark at `start` is mentioned in prose, and opens nothing."""
        text, at = turn.text, start + len(self.begin)
        if start and text[start - 1] in QUOTES and text[at : at + 1] == QUOTES[text[start - 1]]:
            return True
        close = turn.find(self.end, at) if self.end else -1
        again = turn.find(self.begin, at)
        is_closed = close >= 0 and (again < 0 or close < again)
        if is_closed and JOINED.fullmatch(text, at, close):
            return True
        if is_closed or self.looks.match(text, at):
            return False
        return self.is_part or (turn.skip(at) < len(text) and text[at] in PROSE)


QUOTES = {"`": "`", "'": "'", '"': '"', "“": "”", "‘": "’", "«": "»", "*": "*"}
PROSE = " .,;:!?)]\"'`”’»*_"
"""What follows a mark that stands in a sentence."""
JOINED = re.compile(r"[`'\"]? ?(?:[-–—/,…]|\.\.\.| (?:and|or|to) )? ?[`'\"]?|[`'\"]? (?:and|or|to) [`'\"]?")
"""What stands between two marks of which a sentence speaks."""


def take_out(text: str, marks: Sequence[Marks], dropped: Sequence[str] = ()) -> Parsed:
    """The calls of a turn, by marks of one format. dropped: marks around text, which are no text."""
    turn, by_begin = Turn(text), {mark.begin: mark for mark in marks}
    begins = re.compile("|".join(map(re.escape, by_begin)))
    content: list[str] = []
    calls: list[Call] = []
    at = searched = 0
    while match := begins.search(text, searched):
        mark = by_begin[match[0]]
        if mark.is_talk(turn, match.start()):
            searched = match.end()
            continue
        found, end = mark.read(turn, match.end())
        content.append(text[at : match.start()])
        calls += found
        at = searched = max(end, match.end())
    content.append(text[at:])
    rest = "".join(content)
    if not calls and not any(mark in text for mark in dropped):
        return Parsed(text)
    for mark in dropped:
        rest = rest.replace(mark, "")
    return Parsed(rest.strip(), tuple(calls))


def section(begin: str, end: str, item: Marks, may_end_open: bool = False) -> Marks:
    """Marks around calls that have marks of their own."""
    looks = re.compile(r"\s*" + re.escape(item.begin))
    return Marks(begin, end, several(item), looks, may_end_open=may_end_open, is_section=True)


def several(marks: Marks) -> Body:
    """Calls with marks of their own, one after another, at least one."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        calls: list[Call] = []
        while turn.text.startswith(marks.begin, turn.skip(at)):
            found, at = marks.read(turn, turn.skip(at) + len(marks.begin))
            calls += found
        if not calls:
            raise Malformed(f"no {marks.begin} follows")
        return calls, at

    return read
