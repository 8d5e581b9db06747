"""What a model said in a turn, taken apart: reasoning, answer, calls. No torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from siirl.dialect.dialect import Dialect
from siirl.dialect.marks import Split, split_reasoning
from siirl.dialect.template import Vocabulary
from siirl.dialect.tool_formats import MalformedCall, Parsed, ToolCall, ToolParser


@dataclass(frozen=True)
class Said:
    """A turn and its parts; nothing is joined over a token that was left out."""

    raw: str
    """The whole text, special tokens too, without the one that ended it."""
    reasoning: str | None
    """Between the marks of reasoning; None where the model did not reason."""
    answer: str
    """What was said beside reasoning and calls; "" where the reasoning was not ended."""
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    """Calls of tools, in order; none of those that the reasoning mentions."""
    opened: bool | None = False
    """The prompt had opened the reasoning, so that the text begins inside of it; None: perhaps."""
    closed: bool = True
    """The reasoning was ended, if there was any."""
    stretches: int = 0
    """How often it reasoned."""
    leads: bool = False
    """It began by reasoning."""

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for functions in other processes."""
        calls = [
            {"name": x.name, "arguments": x.arguments} if isinstance(x, ToolCall) else {"malformed": x.reason}
            for x in self.calls
        ]
        return {**asdict(self), "calls": calls}


def raw_text(dialect: Dialect, tokenizer: Vocabulary, token_ids: Sequence[int], stopped: bool = True) -> str:
    """The text of a turn with its special tokens, without the stop token that ended it."""
    ids = list(token_ids)
    if stopped and dialect.unsaid_end(ids) is not None:
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def read_turn(dialect: Dialect, raw: str, opened: bool | None, parse: ToolParser | None = None) -> Said:
    """The parts of a turn. opened: whether its prompt had opened the reasoning; None: perhaps.

    parse: reads calls from what is not reasoning.
    """
    marks = dialect.reasoning
    split = Split((), raw, True, False) if marks is None else split_reasoning(raw, marks, opened)
    reasoning = "\n\n".join(split.reasoning) if split.reasoning else None
    parsed = parse(split.rest) if parse is not None and split.closed else Parsed(split.rest)
    answer = parsed.content if split.closed else ""
    parts = (
        answer,
        parsed.calls,
        opened if marks is not None else False,
        split.closed,
        len(split.reasoning),
        split.leads,
    )
    return Said(raw, reasoning, *parts)


def opens_reasoning(dialect: Dialect, prompt_end: str) -> bool | None:
    """Whether a prompt, of which this is the end, opens the reasoning of the turn after it.

    None: perhaps, as it has a mark that nothing has closed.
    """
    marks = dialect.reasoning
    if marks is None or prompt_end.rfind(marks.begin) <= prompt_end.rfind(marks.end):
        return False
    return prompt_end.rstrip().endswith(marks.begin) or None
