"""What a program asks for, and what it is answered, whichever wire it speaks. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from siirl.agents.contexts import Chat

MOST_CHOICES = 128


@dataclass(frozen=True)
class Asked:
    """A request for turns."""

    model: str
    messages: Chat
    """Calls with the ids that the request has for them, reasoning under REASONING."""
    tools: tuple[dict[str, Any], ...] = ()
    most_tokens: int | None = None
    """None: as many as the run allows."""
    streams: bool = False
    with_usage: bool = True
    """A stream ends with the number of tokens."""
    unused: tuple[str, ...] = ()
    """Parameters that were set and change nothing."""
    stop: tuple[str, ...] = ()
    """Texts at whose first occurrence the turn ends."""
    choices: int = 1
    """Turns after the same conversation."""
    with_log_probs: bool = False
    with_token_ids: bool = False
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """In the place of messages: what is gone on from, as text or tokens, `choices` times each."""

    @property
    def num_turns(self) -> int:
        return self.choices * max(1, len(self.prompts))


REASONING = "reasoning_content"
"""Key of a message under which its reasoning stands."""


@dataclass(frozen=True)
class Token:
    """One that was sampled."""

    id: int
    text: str
    log_prob: float


@dataclass(frozen=True)
class Said:
    """A turn that was asked for: one of the choices of an answer."""

    key: str
    model: str
    turn: int
    message: dict[str, Any]
    """As templates have it: its calls have ids."""
    finish_reason: str
    """ "stop", "length" or "tool_calls"."""
    num_read: int
    num_said: int
    reasoning: str | None = None
    """What the model thought before, if it did."""
    stop: str | None = None
    """The text of the request that ended it."""
    tokens: tuple[Token, ...] = ()
    """What was sampled, where the request wants to know."""
    read_ids: tuple[int, ...] = field(default=(), repr=False)
    """What it was sampled after, where the request wants to know."""
    num_reasoned: int = 0
    """Tokens up to the end of the reasoning."""
    prompt: int = 0
    """Which prompt of the request it follows."""
    with_log_probs: bool = False
    """The request wants to know those of `tokens`."""

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens."""
        return usage([self])

    def without_tokens(self) -> "Said":
        """The same for a request that does not want to know them."""
        return replace(self, tokens=(), read_ids=())


Tell = Callable[[int, Said], None]
"""Gets a choice by its number, and as much of it as is certain while it is being generated."""


@dataclass
class Told:
    """What a stream has said of a choice."""

    reasoning: str = ""
    answer: str = ""

    def more(self, said: Said) -> tuple[str, str]:
        """What there is now besides, of its reasoning and its answer: it is told with this.

        Nothing is taken back: of a text that goes on otherwise than it began nothing more is told.
        """
        reasoning, answer = (said.reasoning or "").strip(), said.message["content"] or ""
        more = _behind(self.reasoning, reasoning), _behind(self.answer, answer)
        self.reasoning, self.answer = self.reasoning + more[0], self.answer + more[1]
        return more


def _behind(told: str, text: str) -> str:
    return text[len(told) :] if text.startswith(told) else ""


class AnswerStream(Protocol):
    """Writes an answer as server-sent events."""

    def more(self, index: int, said: Said) -> Iterator[bytes]:
        """What is said of a choice that is being generated. The first is that of the first choice."""
        ...

    def end(self, answer: Sequence[Said]) -> Iterator[bytes]:
        """The rest, once all choices are complete."""
        ...


def usage(answer: Sequence[Said]) -> dict[str, int]:
    """The numbers of tokens of all choices; what they were sampled after counts once for each prompt."""
    read = sum({one.prompt: one.num_read for one in answer}.values())
    said = sum(one.num_said for one in answer)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


def calls_of(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The calls of tools in a message."""
    return message.get("tool_calls", ())
