"""How a chat template takes the messages of a conversation: found by probing it. No torch.

Conversations have one form here: content is text or parts, arguments of calls are mappings. Templates differ:
some want arguments as JSON, content as parts, null where there is none, or tools under another name.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from siirl.agents.shown import for_template, parts_of
from siirl.dialect.marks import ReasoningMarks
from siirl.dialect.parts import Said
from siirl.dialect.template import ChatTemplate, TemplateRefused
from siirl.dialect.tool_formats import ToolCall, ToolParser

Chat = list[dict[str, Any]]

STAND_IN = "STANDINFORTHETURN"
"""Stands for what somebody says; no letter of it is changed by trimming or escaping."""
ASKED, ANSWERED = {"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}


class OwnTurn(dict[str, Any]):
    """A turn of an agent as a message: reasoning, answer and calls apart where the template takes them so.

    The template decides how: of several forms that say the same, the first that it writes as the agent did.
    """

    def __init__(
        self,
        said: Said,
        marks: ReasoningMarks | None,
        turn: int,
        parse: ToolParser | None = None,
        plain: Said | None = None,
        frame: tuple[str, str, str] = ("", "", ""),
    ) -> None:
        """turn: its number, of which the ids of calls are made that the model gave none. parse: read them.

        plain: the same with its calls as text, for a template that does not write calls. frame: what the
        template writes before and behind a plain answer, and where it has a turn begin.
        """
        self.said, self.parse, self.turn = said, parse, turn
        calls = [call for call in said.calls if isinstance(call, ToolCall)]
        self.ids = [call.id or call_id(turn, index) for index, call in enumerate(calls)]
        """Of its calls."""
        if plain is not None:
            said, calls = plain, []
        parts: dict[str, Any] = {"role": "assistant", "content": said.raw}
        reasoned = bool(said.reasoning and said.reasoning.strip())
        apart = reasoned and marks is not None and marks.key is not None
        if apart:
            parts[marks.key] = said.reasoning
        if calls:
            parts["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for id, call in zip(self.ids, calls, strict=True)
            ]
        contents = [_unframed(said.raw, *frame[:2]), said.raw, said.raw.strip()]
        if reasoned and not apart and calls and marks is not None:
            contents = [_with_reasoning(said, marks)]
        elif apart or calls:
            contents = [said.answer.strip(), said.answer]
        elif not reasoned and said.answer.strip() != said.raw.strip():
            contents = [said.answer.strip(), said.answer, *contents]
        begun = frame[2].strip()  # some begin no turn behind answers of tools: the model does
        if begun and said.raw.lstrip().startswith(begun):
            contents = [content.strip().removeprefix(begun).strip() for content in contents] + contents
        if apart and calls:
            contents.append("")  # gpt-oss takes no answer beside reasoning and a call
        self.forms = [{**parts, "content": content} for content in dict.fromkeys(contents)]
        """What it may be; it is the first of them until the template has been asked."""
        self.word_for_word = {"role": "assistant", "content": said.raw}
        super().__init__(self.forms[0])
        self.settled = False

    def be(self, form: Mapping[str, Any], settled: bool = True) -> None:
        """Take one of its forms; settled: for good."""
        self.clear()
        self.update(form)
        self.settled = settled


def _unframed(raw: str, before: str, after: str) -> str:
    """What was said without what the template writes around it."""
    return raw.removeprefix(before).removesuffix(after) if raw.startswith(before) else raw


def _with_reasoning(said: Said, marks: ReasoningMarks) -> str:
    """What was said before the calls, reasoning and its marks included."""
    head, mark, rest = said.raw.rpartition(marks.end)
    answer = said.answer.strip()
    between = rest[: rest.find(answer)] if answer and answer in rest else ""
    return f"{head}{mark}{between}{answer}"


def call_id(turn: int, index: int) -> str:
    """The name of a call: nine characters, as Mistral wants."""
    return f"c{turn:06d}{index:02d}"


@dataclass(frozen=True)
class CallForm:
    """How a template takes an assistant's message with calls."""

    as_json: bool
    """Arguments are JSON in a text."""
    empty: str | None
    """The content where there is none."""


class MessageForm:
    """In which form one template takes messages."""

    def __init__(self, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.template, self.tools = template, list(tools)
        self._taken: dict[str, bool] = {}

    def text(self, messages: Sequence[Mapping[str, Any]], generation: bool = True) -> str:
        """What the template makes of messages. TemplateRefused."""
        return self.template.render(self._spelled(messages), self.tools, generation)

    def takes(self, role: str) -> bool:
        """Whether what a message of this role says is in the text: some templates leave it out or refuse."""
        if role in ("user", "assistant"):
            return True
        if role not in self._taken:
            probe = {"role": role, "content": STAND_IN}
            before = [ASKED, ANSWERED]
            if role == "tool" and self.calls is not None:
                call = _call("look", {"q": "..."})
                before = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
                probe |= {"name": "look", "tool_call_id": call["id"]}
            messages = [probe, ASKED] if role == "system" else [*before, probe]
            self._taken[role] = STAND_IN in self._attempt(messages)
        return self._taken[role]

    @cached_property
    def calls(self) -> CallForm | None:
        """How the template takes calls; None: it does not write them, or not as the model was told to."""
        if self.template.in_system and self.tools:
            return None
        arguments = {"standinkey": STAND_IN}
        for form in (CallForm(*pair) for pair in ((False, ""), (True, ""), (False, None), (True, None))):
            message = {"role": "assistant", "content": "", "tool_calls": [_call("look", arguments)]}
            text = self._attempt([ASKED, message], form)
            quoted = "'standinkey'" in text or '\\"standinkey' in text  # as Python writes it, or JSON twice
            if STAND_IN in text and not quoted:
                return form
        return None

    @cached_property
    def in_parts(self) -> bool:
        """Whether content has to be a list of parts."""
        probe = {"role": "user", "content": STAND_IN}
        if STAND_IN in self.template.attempt([probe]):
            return False
        return STAND_IN in self.template.attempt([{**probe, "content": parts_of(STAND_IN)}])

    def _attempt(self, messages: Sequence[Mapping[str, Any]], form: CallForm | None = None) -> str:
        try:
            return self.template.render(self._spelled(messages, form), self.tools)
        except TemplateRefused:
            return ""

    def _spelled(self, messages: Sequence[Mapping[str, Any]], form: CallForm | None = None) -> Chat:
        spelled = []
        for message in for_template(list(_answering(messages))):
            if message.get("tool_calls"):
                message = _spelled_calls(message, form or self.calls)
            if isinstance(message["content"], str) and self.in_parts:
                message = {**message, "content": parts_of(message["content"])}
            spelled.append(message)
        return spelled


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id(0, 0), "type": "function", "function": function}


def _spelled_calls(message: dict[str, Any], form: CallForm | None) -> dict[str, Any]:
    """A message with calls in the form of a template; without them if it takes none."""
    if form is None:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    calls = message["tool_calls"]
    if form.as_json:
        functions = [call["function"] for call in calls]
        texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
        calls = [
            {**call, "function": {**call["function"], "arguments": text}}
            for call, text in zip(calls, texts, strict=True)
        ]
    return {**message, "content": message["content"] or form.empty, "tool_calls": calls}


def _answering(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages, each answer of a tool with the id and the name of its call, where they were left out."""
    waiting: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        message = message if isinstance(message, OwnTurn) else dict(message)
        if message["role"] == "assistant" and message.get("tool_calls"):
            if any("id" not in call for call in message["tool_calls"]):
                calls = enumerate(message["tool_calls"])
                named = [{"id": call_id(number, index), "type": "function", **call} for index, call in calls]
                message = {**message, "tool_calls": named}
            waiting = list(message["tool_calls"])
        elif message["role"] == "tool" and waiting:
            ids = [call["id"] for call in waiting]
            call = waiting.pop(
                ids.index(message["tool_call_id"]) if message.get("tool_call_id") in ids else 0
            )
            message = {"name": call["function"]["name"], **message, "tool_call_id": call["id"]}
        elif message["role"] != "tool":
            waiting = []
        yield message
