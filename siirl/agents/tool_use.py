"""What an agent with tools does after a turn: call those that the turn names, and read what they answer."""

from dataclasses import dataclass

from siirl.agents.episode import Episode, Message
from siirl.agents.message_form import OwnTurn
from siirl.agents.tool_files import load_tools
from siirl.agents.tools import Toolbox, ToolLimits, run_tools
from siirl.compiler.interactions.stages import assistant_turns
from siirl.config.rollout import MultiTurnConfig
from siirl.dialect.tool_formats import ToolCall, ToolParser, tool_parser
from siirl.observe.printable import encodable


@dataclass(frozen=True)
class ToolUse:
    """The tools of a rollout node."""

    toolbox: Toolbox
    parse: ToolParser
    limits: ToolLimits
    most_rounds: int
    """How often an agent goes on after answers."""

    async def answer(self, turn: Message, own: OwnTurn, episode: Episode) -> list[Message]:
        """The answers to the calls in a turn, which its agent alone reads; none if it calls nothing.

        own: the turn before any post-processing. A turn with calls is no longer read by others.
        """
        calls = own.said.calls
        if not calls:
            return []
        responses = await run_tools(calls, self.toolbox, episode, self.limits)
        turn.to = turn.agent
        turn.info["tool_calls"] = len(calls)
        turn.info["tool_errors"] = [response.error for response in responses if response.error]
        ids = iter(own.ids)
        return [
            Message(
                "tool",
                encodable(response.text),
                node=turn.node,
                to=turn.agent,
                images=response.images,
                name=call.name if isinstance(call, ToolCall) else None,
                call_id=next(ids) if isinstance(call, ToolCall) else None,
                info={"tool": response.tool, **({"error": response.error} if response.error else {})},
            )
            for call, response in zip(calls, responses, strict=True)
        ]


def tool_use(multi_turn: MultiTurnConfig, who: str, sees: bool = False) -> ToolUse | None:
    """What rollout.multi_turn of a node says; None unless enabled. ConfigError or DagError for a bad file.

    sees: whether its model sees images.
    """
    if not multi_turn.enable:
        return None
    return ToolUse(
        load_tools(multi_turn, who),
        tool_parser(multi_turn.format),
        ToolLimits.of(multi_turn, sees),
        assistant_turns(multi_turn) - 1,
    )
