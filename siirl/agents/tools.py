"""Tools that agents call within a turn: their calls are checked, and run with deadlines.

Whatever a model writes wrongly, and whatever goes wrong in a tool, becomes a text for the model and a count.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from siirl.agents.shown import PLACE, Shown, read_shown, shows_images
from siirl.agents.tool_schema import argument_errors
from siirl.agents.user_thread import CallSlots, Hung, Raised, UserThread
from siirl.config.rollout import MultiTurnConfig
from siirl.dialect.tool_formats import MalformedCall, ToolCall, from_texts

log = logging.getLogger(__name__)
UNKNOWN, MALFORMED, ARGUMENTS, RAISED, HUNG, TOO_MANY = (
    "unknown",
    "malformed",
    "arguments",
    "raised",
    "hung",
    "too_many",
)
"""Kinds of errors of a call."""


class Tool(Protocol):
    """One tool, shared by all episodes of a rank; `Class(**config)`. A plain function may be one, too.

    Calling it may block or be awaited; several calls may run at once,
    in threads of their own. What belongs to an episode goes into episode.state.
    """

    schema: dict[str, Any]
    """In OpenAI's function format."""

    def __call__(self, arguments: dict[str, Any], episode: Any) -> Any:
        """The text for the model (another value is written out by str), or content with images, as an
        environment may give it."""
        ...


@dataclass(frozen=True)
class ToolLimits:
    """How much an agent may ask of tools."""

    max_calls: int = 1
    """Of one turn."""
    max_length: int = 256
    """Characters of a response."""
    side: str = "middle"
    """Where a longer one is cut."""
    deadline_s: float = 30.0
    sees: bool = False
    """Whether the agent sees images; to others their places say that they are left out."""

    @classmethod
    def of(cls, multi_turn: MultiTurnConfig, sees: bool = False) -> "ToolLimits":
        """As the configuration says."""
        return cls(
            multi_turn.max_parallel_calls,
            multi_turn.max_tool_response_length,
            multi_turn.tool_response_truncate_side,
            multi_turn.tool_timeout_s,
            sees,
        )


@dataclass(frozen=True)
class ToolResponse:
    """What the model reads after a call."""

    text: str
    images: tuple[str, ...] = ()
    tool: str | None = None
    """None if it is unknown."""
    error: str | None = None
    """The kind of error; None: there was none."""
    truncated: bool = False


class Toolbox:
    """The tools of one rollout node, and the threads in which they run."""

    def __init__(self, tools: Mapping[str, Tool]):
        self.tools = dict(tools)
        self._idle: list[UserThread] = []
        self._places = {name: CallSlots(getattr(tool, "max_concurrent", 0)) for name, tool in tools.items()}
        self._told: set[str] = set()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What a chat template is told of the tools."""
        return [tool.schema for tool in self.tools.values()]

    async def call(self, name: str, arguments: dict[str, Any], episode: Any, deadline_s: float) -> Shown:
        """The answer of a tool whose arguments have been checked. Raised or Hung if there is none."""
        deadline_s += getattr(self.tools[name], "patience_s", 0.0)
        async with self._places[name].place():
            thread = self._idle.pop() if self._idle else UserThread("tool")
            try:
                return await thread.call(deadline_s, lambda: self.tools[name](arguments, episode), _read)
            finally:
                if not thread.abandoned:
                    self._idle.append(thread)

    def tell(self, name: str, what: str, arguments: dict[str, Any]) -> None:
        """Log what went wrong in a tool, once in a run: later ones are counted only."""
        if name not in self._told:
            self._told.add(name)
            log.warning(
                "tool %r, called with %.200r, %s\nThe model reads an error (interaction/tool_errors). "
                "This is said once for each tool.",
                name,
                arguments,
                what,
            )

    def close(self) -> None:
        """End the threads. Tools that hold something give it back as the process ends."""
        while self._idle:
            self._idle.pop().end()


async def run_tools(
    calls: Sequence[ToolCall | MalformedCall], toolbox: Toolbox, episode: Any, limits: ToolLimits
) -> list[ToolResponse]:
    """The response to each call, in order; calls of one turn run at once. Errors are responses as well.

    Only a SiirlError of a tool (a sandbox that does not work) is raised.
    """
    return list(
        await asyncio.gather(
            *(_respond(call, index, toolbox, episode, limits) for index, call in enumerate(calls))
        )
    )


async def _respond(
    call: ToolCall | MalformedCall, index: int, toolbox: Toolbox, episode: Any, limits: ToolLimits
) -> ToolResponse:
    if isinstance(call, MalformedCall):
        return _error(MALFORMED, None, f"{call.reason}. Nothing was called.", limits)
    tool = toolbox.tools.get(call.name)
    if tool is None:
        known = ", ".join(toolbox.tools) or "none"
        return _error(UNKNOWN, None, f"there is no tool {call.name[:60]!r}. Tools: {known}.", limits)
    if index >= limits.max_calls:
        reason = f"at most {limits.max_calls} calls in one turn: this one was not made."
        return _error(TOO_MANY, call.name, reason, limits)
    arguments = from_texts(call.arguments, tool.schema) if call.as_text else call.arguments
    problems = argument_errors(arguments, tool.schema)
    if problems:
        return _error(ARGUMENTS, call.name, f"{call.name}: {'; '.join(problems)}.", limits)
    try:
        answer = await toolbox.call(call.name, arguments, episode, limits.deadline_s)
    except Hung as error:
        toolbox.tell(call.name, f"gave {error}", arguments)
        return _error(HUNG, call.name, f"{call.name} gave {error}.", limits)
    except Raised as error:
        toolbox.tell(call.name, f"raised {error.trace}", arguments)
        return _error(RAISED, call.name, f"{call.name} failed: {error}", limits)
    if not limits.sees:
        answer = Shown(answer.without_images())
    text = _cut(answer, limits)
    return ToolResponse(text, answer.images, call.name, None, text != answer.text)


def _read(answer: Any) -> Shown:
    return read_shown(answer) if shows_images(answer) else Shown(str(answer))


def _cut(answer: Shown, limits: ToolLimits) -> str:
    """The text of an answer, within the limit; of one that is cut the images come first."""
    words = answer.text.replace(PLACE, "") if answer.images else answer.text
    if len(words) <= limits.max_length:
        return answer.text
    return PLACE * len(answer.images) + truncated(words, limits.max_length, limits.side)


def _error(kind: str, tool: str | None, reason: str, limits: ToolLimits) -> ToolResponse:
    text = f"Error: {reason}"
    cut = truncated(text, limits.max_length, "left")
    return ToolResponse(cut, (), tool, kind, cut != text)


def truncated(text: str, length: int, side: str) -> str:
    """At most `length` characters of a text, and a note. side: which part is kept, "left", "right", or both
    ends for "middle".
    """
    if len(text) <= length:
        return text
    if side == "left":
        return text[:length] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - length :]
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]
