"""Marks around reasoning and answers: a table of families, and turns split by them. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ReasoningMarks:
    """Between which marks a model reasons."""

    begin: str
    end: str
    key: str | None = None
    """The key of a message under which the template takes reasoning; None: it has none."""
    opened: bool = False
    """The generation prompt ends behind `begin`: a turn begins inside of the reasoning."""
    closed: bool = False
    """The generation prompt holds an empty reasoning: a turn begins behind it."""
    answer: tuple[str, str] = ("", "")
    """What stands around an answer, where the family has marks for it."""


FINAL = "<|start|>assistant<|channel|>final<|message|>"

KNOWN = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<think:opensource>", "</think:opensource>"),
    *(
        ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>", answer=answer)
        for answer in (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))
    ),
    ReasoningMarks(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>", answer=(FINAL, "")),
    ReasoningMarks("<|channel>thought", "<channel|>"),
    ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningMarks("<thought>", "</thought>"),
    ReasoningMarks("<reasoning>", "</reasoning>"),
)
"""Those of families, the more telling first."""

OPENINGS = {FINAL: FINAL.removeprefix("<|start|>assistant")}
"""Of an answer that is the first of a turn: what of its mark the generation prompt has written already."""


class Split(NamedTuple):
    """A turn of which reasoning is split off."""

    reasoning: tuple[str, ...]
    """Its stretches, in order."""
    rest: str
    """What else was said; what stood on both sides of reasoning is kept apart by a blank line."""
    closed: bool
    """The last stretch was ended, if there is one."""
    leads: bool
    """The turn began by reasoning."""


def split_reasoning(text: str, marks: ReasoningMarks, opened: bool | None) -> Split:
    """A turn split at its marks. opened: the prompt has written the first; None: perhaps, so that an end
    without a beginning ends reasoning that began with the turn.
    """
    stretches = list(_stretches(text, marks, opened))
    reasoning = tuple(part.strip("\n") for inside, part, _ in stretches if inside)
    rest = [part for inside, part, _ in stretches if not inside and part.strip()]
    inside, _, ended = stretches[-1]
    leads = bool(opened) or text.lstrip().startswith(marks.begin)
    return Split(reasoning, _without_marks("\n\n".join(rest), marks), ended or not inside, leads)


def _stretches(text: str, marks: ReasoningMarks, opened: bool | None) -> Iterator[tuple[bool, str, bool]]:
    """(inside of reasoning, the text, whether it was ended) from the first on."""
    at, inside = 0, bool(opened)
    if inside and text.lstrip().startswith(marks.begin):  # repeats what the prompt has written
        at = text.index(marks.begin) + len(marks.begin)
    elif opened is None:
        first, last = text.find(marks.begin), text.find(marks.end)
        inside = last >= 0 and not 0 <= first < last
    while at <= len(text):
        mark = marks.end if inside else marks.begin
        found = text.find(mark, at)
        if found < 0:
            yield inside, text[at:], False
            return
        yield inside, text[at:found], True
        at, inside = found + len(mark), not inside


def _without_marks(text: str, marks: ReasoningMarks) -> str:
    """An answer without the family's marks of one."""
    begin, end = marks.answer
    stripped = text.strip()
    for opening in (begin, OPENINGS.get(begin, begin)):
        if opening and stripped.startswith(opening):
            inner = stripped.removeprefix(opening)
            return inner.removesuffix(end) if end else inner
    return text
