"""Anthropic's messages on the wire: what a program asks, and what it is answered. Pure.

Source of the format: the API reference of Anthropic, "Messages". A message of blocks becomes messages of chat
templates: the results of tools one each, before the text that stands beside them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from siirl.agents.contexts import Chat
from siirl.agents.outside.chat_wire import CHOOSES, IMAGES, assistant, content_on, text_of
from siirl.agents.outside.content import BadRequest
from siirl.agents.outside.exchange import Asked, Said, Told, calls_of
from siirl.agents.outside.parameters import TEMPLATE, flag, given, names, shown, stop_strings, whole_number

ACTS = names("model messages system tools tool_choice max_tokens stream stop_sequences")
REFUSED = {"thinking": ({"type": "disabled"}, TEMPLATE)}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def asked_of(body: Any) -> Asked:
    """The request that a JSON body is. BadRequest if it is none, or asks for what siirl does not do."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise BadRequest("a request is a JSON object with model, max_tokens and messages")
    unused = given(body, ACTS, REFUSED)
    choice = body.get("tool_choice") or {"type": "auto"}
    chooses = isinstance(choice, dict) and choice.get("type") in ("auto", "none")
    if not chooses or choice.get("disable_parallel_tool_use"):
        raise BadRequest(f"tool_choice = {shown(choice)}: {CHOOSES}, and how often")
    most_tokens, messages = whole_number(body, "max_tokens"), body.get("messages")
    if most_tokens is None:
        raise BadRequest("max_tokens = null is no whole number of at least 1")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list of messages")
    chat: Chat = []
    if body.get("system"):
        chat.append({"role": "system", "content": text_of(body["system"], "system")})
    for index, message in enumerate(messages):
        chat += _messages(message, f"messages[{index}]")
    tools = () if choice["type"] == "none" else _tools(body.get("tools"))
    stop, streams = stop_strings(body, "stop_sequences"), flag(body, "stream")
    return Asked(body["model"], chat, tools, most_tokens, streams, unused=unused, stop=stop)


def message(answer: Sequence[Said], created: int) -> dict[str, Any]:
    """The answer in one piece."""
    (said,) = answer
    return _head(said) | {
        "content": _blocks(said),
        **_ended(said),
        "usage": {"input_tokens": said.num_read, "output_tokens": said.num_said},
    }


class Stream:
    """The answer as server-sent events (an AnswerStream): texts as they come, each call in one piece.

    Reasoning after an answer has begun is told at the end.
    """

    def __init__(self, created: int, with_usage: bool) -> None:
        self._told, self._begun = Told(), list[str]()

    def more(self, index: int, said: Said) -> Iterator[bytes]:
        """See AnswerStream."""
        if self._told.answer:
            said = replace(said, reasoning=self._told.reasoning)
        thought, text = self._told.more(said)
        for block in _blocks(said):
            if new := {"thinking": thought, "text": text}[block["type"]]:
                yield from self._say(said, block, block["type"], new)

    def end(self, answer: Sequence[Said]) -> Iterator[bytes]:
        """See AnswerStream."""
        (said,) = answer
        thought, text = self._told.more(said)
        for index, block in enumerate(_blocks(said)):
            if block["type"] == "tool_use":
                written = json.dumps(block["input"], ensure_ascii=False)
                yield from self._say(said, block, f"tool_use {index}", written)
                continue
            new = thought if block["type"] == "thinking" else text
            if new or block["type"] not in self._begun:
                yield from self._say(said, block, block["type"], new)
        yield from self._close(said)
        yield _event("message_delta", {"delta": _ended(said), "usage": {"output_tokens": said.num_said}})
        yield _event("message_stop", {})

    def _say(self, said: Said, block: Mapping[str, Any], name: str, new: str) -> Iterator[bytes]:
        """Add to a block; a new one ends the one before it."""
        kind = block["type"]
        if not self._begun:
            usage = {"input_tokens": said.num_read, "output_tokens": 0}
            begun = {"content": [], "stop_reason": None, "usage": usage}
            yield _event("message_start", {"message": _head(said) | begun})
        if name not in self._begun:
            yield from self._close(said)
            self._begun.append(name)
            place = {"index": self._begun.index(name)}
            yield _event("content_block_start", place | {"content_block": {**block, **EMPTY[kind]}})
        delta = {"type": DELTAS[kind][0], DELTAS[kind][1]: new}
        yield _event("content_block_delta", {"index": self._begun.index(name), "delta": delta})

    def _close(self, said: Said) -> Iterator[bytes]:
        """End the last block."""
        if self._begun:
            place = {"index": len(self._begun) - 1}
            if self._begun[-1] == "thinking":
                signed = {"type": "signature_delta", "signature": said.key}
                yield _event("content_block_delta", place | {"delta": signed})
            yield _event("content_block_stop", place)


EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""Type of a block -> what it has where it begins."""
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type of what is added to it, and its key."""


def _ended(said: Said) -> dict[str, Any]:
    """Why a turn ended."""
    reason = STOP_REASONS[said.finish_reason]
    if said.stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": said.stop}


def error_body(text: str, code: str) -> dict[str, Any]:
    """An error as clients read it."""
    kind = {"invalid_api_key": "authentication_error", "model_not_found": "not_found_error"}
    error = {"type": kind.get(code, "invalid_request_error"), "message": text}
    return {"type": "error", "error": error}


def _head(said: Said) -> dict[str, Any]:
    same = {"type": "message", "role": "assistant", "stop_sequence": None}
    return {"id": f"msg_{said.key}", "model": said.model, **same}


def _event(name: str, value: dict[str, Any]) -> bytes:
    data = json.dumps({"type": name, **value})
    return f"event: {name}\ndata: {data}\n\n".encode()


def _blocks(said: Said) -> list[dict[str, Any]]:
    content, calls = said.message["content"], calls_of(said.message)
    blocks: list[dict[str, Any]] = []
    if said.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": said.reasoning.strip(), "signature": said.key})
    if content or not calls:
        blocks.append({"type": "text", "text": content})
    for call in calls:
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        blocks.append({**block, "input": call["function"]["arguments"]})
    return blocks


KINDS = {
    "user": ("text", "tool_result", *IMAGES),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
"""Role -> types of blocks."""


def _messages(message: Any, where: str) -> Chat:
    """What a message of blocks is to a chat template."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise BadRequest(f"{where} has no role of user, assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise BadRequest(f"{where}: its content is {shown(content)}, neither text nor blocks")
    for block in blocks:
        if block.get("type") not in KINDS[role]:  # a list, say, is no key
            raise BadRequest(f"{where}: its content has {shown(block)}: there are text, images and tools")
    if role == "assistant":
        texts = [block for block in blocks if block["type"] == "text"]
        thoughts = [text_of(block.get("thinking"), where) for block in blocks if block["type"] == "thinking"]
        calls = [_call(block, where) for block in blocks if block["type"] == "tool_use"]
        return [assistant(text_of(texts, where), calls, "\n\n".join(thoughts))]
    results = [_result(block, where) for block in blocks if block["type"] == "tool_result"]
    said = [block for block in blocks if block["type"] != "tool_result"]
    if not said and results:
        return results
    return [*results, {"role": "user", "content": content_on(said, where) if said else ""}]


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The answer of a tool."""
    made = {"role": "tool", "content": content_on(block.get("content"), where)}
    if not isinstance(id := block.get("tool_use_id"), str | None):
        raise BadRequest(f"{where}: tool_use_id = {shown(id)} is no text")
    return made if id is None else made | {"tool_call_id": id}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise BadRequest(f"{where}: {shown(block)} is no call of a tool")
    if not isinstance(id := block.get("id"), str | None):
        raise BadRequest(f"{where}: id = {shown(id)} is no text")
    made = {"type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
    return made if id is None else made | {"id": id}


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tools in OpenAI's function format, as chat templates know them."""
    found = []
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
            raise BadRequest(f"tools[{index}] = {shown(tool)} is no tool with an input_schema")
        function = {"name": tool["name"], "description": tool.get("description", "")}
        found.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return tuple(found)
