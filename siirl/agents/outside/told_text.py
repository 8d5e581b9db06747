"""How much of a turn can be told while it is being said: what begins its parts, whatever else comes. Pure.

What may be the beginning of something else waits: of a character, a text of `stop`, a mark of reasoning or of
an answer, a call, and spaces, which may turn out to be the last.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from siirl.dialect.marks import OPENINGS, ReasoningMarks, split_reasoning

UNFINISHED = "\ufffd"
"""What tokenizers decode bytes to that are no character, or none yet."""


@dataclass(frozen=True)
class ToldText:
    """What decides where the parts of a turn begin and end."""

    marks: ReasoningMarks | None
    opened: bool | None
    """The prompt has opened the reasoning; None: perhaps."""
    stop: tuple[str, ...] = ()
    begins: tuple[str, ...] | None = ()
    """With what calls begin, if there may be any; None: nobody knows, so that no answer is told."""
    is_raw: bool = False
    """The answer is the text as it was said."""

    def parts(self, raw: str) -> tuple[str | None, str]:
        """(reasoning, answer) as far as they are certain, of a turn that begins with `raw`."""
        raw = _without_begun(raw.rstrip(UNFINISHED), self.stop)
        if self.is_raw:
            return None, raw
        if self.marks is None:
            return None, self._answer(raw, raw)
        text = _without_begun(raw, (self.marks.begin, self.marks.end))
        if not self._is_certain(text, self.marks):
            return None, ""
        split = split_reasoning(text, self.marks, self.opened)
        if not split.reasoning:
            return None, self._answer(self._beside(split.rest, self.marks), raw)
        rest = self._beside(split.rest, self.marks)
        return "\n\n".join(split.reasoning).strip(), self._answer(rest, rest)

    def _is_certain(self, text: str, marks: ReasoningMarks) -> bool:
        """Whether it is known if the turn begins inside of the reasoning, and where."""
        if self.opened:  # it may repeat what the prompt has written
            head = text.lstrip()
            return head.startswith(marks.begin) or not marks.begin.startswith(head)
        return self.opened is False or marks.begin in text or marks.end in text

    def _beside(self, rest: str, marks: ReasoningMarks) -> str:
        """What is certain of an answer that may have marks of its own."""
        begin, end = marks.answer
        head = rest.strip()
        if any(mark.startswith(head) for mark in (begin, OPENINGS.get(begin, begin)) if mark):
            return ""
        return _without_begun(head, (end + " ",)) if end else rest

    def _answer(self, rest: str, raw: str) -> str:
        """What is certain of an answer with calls. raw: what is told where they cannot be read."""
        if self.begins is None:
            return ""
        rest = rest.strip()
        found = [at for mark in self.begins if (at := rest.find(mark)) >= 0]
        rest = rest[: min(found)] if found else _without_begun(rest, self.begins)
        return rest.rstrip() if not self.begins or raw.strip().startswith(rest.rstrip()) else ""


def _without_begun(text: str, marks: Iterable[str]) -> str:
    """A text without what stands at its end and may be the beginning of a mark."""
    begun = 0
    for mark in marks:
        lengths = range(min(len(mark) - 1, len(text)), begun, -1)
        begun = next((length for length in lengths if text.endswith(mark[:length])), begun)
    return text[: len(text) - begun]
