"""Which messages of a request are turns of the agent, as it said them. No torch.

A turn is known again by its answer and its calls: programs strip texts, drop reasoning, and name calls anew.
Where several turns say the same, what else there is decides: ids, reasoning, what came before.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from siirl.agents.message_form import Chat, OwnTurn
from siirl.agents.outside.exchange import REASONING, calls_of


@dataclass(frozen=True)
class _Turn:
    number: int
    message: dict[str, Any]
    """As rows name it."""
    own: OwnTurn
    reasoning: str
    before: str
    """Key of what came before it."""


class OwnTurns:
    """The turns of one agent in an episode, and what programs make of them."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, list[_Turn]] = defaultdict(list)  # by what a program may call them

    def add(
        self,
        before: Chat,
        message: dict[str, Any],
        own: OwnTurn,
        number: int,
        reasoning: str | None,
        also: Mapping[str, Any] | None = None,
    ) -> None:
        """A turn was said after `before`; rows name it `message`.

        reasoning: what the program was told of it. also: another message that means this turn.
        """
        turn = _Turn(number, message, own, (reasoning or "").strip(), _key(before))
        for name in {_name(one) for one in (message, also) if one is not None}:
            self._turns[name].append(turn)

    def read(self, messages: Chat) -> tuple[Chat, Chat]:
        """The messages of a request as rows name them, and as templates get them."""
        named: Chat = []
        spelled: Chat = []
        ids: dict[str, str] = {}
        for message in messages:
            turn = self._find(message, named) if message["role"] == "assistant" else None
            if turn is not None:
                theirs, ours = calls_of(message), calls_of(turn.message)
                ids |= {its["id"]: our["id"] for its, our in zip(theirs, ours, strict=True) if "id" in its}
                named.append(turn.message)
                spelled.append(turn.own)
                continue
            if (id := message.get("tool_call_id")) in ids:
                message = message | {"tool_call_id": ids[id]}
            named.append(message)
            spelled.append(message)
        return named, spelled

    def _find(self, message: Mapping[str, Any], before: Chat) -> _Turn | None:
        """The turn that a message is."""
        reasoning = message.get(REASONING, "").strip()
        turns = [one for one in self._turns.get(_name(message), ()) if reasoning in ("", one.reasoning)]
        if len(turns) < 2:
            return turns[0] if turns else None
        ids, key = [call.get("id") for call in calls_of(message)], _key(before)
        return max(
            turns,
            key=lambda one: (
                bool(ids) and ids == [call["id"] for call in calls_of(one.message)],
                bool(reasoning),
                one.before == key,
                one.number,
            ),
        )


def _name(message: Mapping[str, Any]) -> str:
    """What a message says: answer, and calls without their ids."""
    return _key([message["content"].strip(), [call["function"] for call in calls_of(message)]])


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
