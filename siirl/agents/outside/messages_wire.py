"""Anthropic's messages on the wire: what a program asks, and what it is answered. Pure.

Source of the format: the API reference of Anthropic, "Messages". A message of blocks becomes messages of chat
templates: the results of tools one each, before the text that stands beside them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from siirl.agents.contexts import Chat
from siirl.agents.outside.chat_wire import Asked, Said, call_id, shown, text_of
from siirl.agents.outside.content import ENDS, BadRequest, refuse

REFUSED = {
    "stop_sequences": ([], ENDS),
    "thinking": ({"type": "disabled"}, "a turn is text and calls"),
}
"""Parameter -> (the value besides null that is taken, why another one is refused)."""
OF_THE_RUN = ("temperature", "top_p", "top_k")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def asked_of(body: Any) -> Asked:
    """The request that a JSON body is. BadRequest if it is none, or asks for what siirl does not do."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise BadRequest("a request is a JSON object with model, max_tokens and messages")
    refuse(body, REFUSED)
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise BadRequest(f"tool_choice = {shown(choice)}: the policy chooses")
    most_tokens, messages = body.get("max_tokens"), body.get("messages")
    if isinstance(most_tokens, bool) or not isinstance(most_tokens, int) or most_tokens < 1:
        raise BadRequest(f"max_tokens = {shown(most_tokens)} is no whole number of at least 1")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list of messages")
    chat: Chat = []
    if body.get("system"):
        chat.append({"role": "system", "content": text_of(body["system"], "system")})
    for index, message in enumerate(messages):
        chat += _messages(message, f"messages[{index}]")
    tools = () if choice["type"] == "none" else _tools(body.get("tools"))
    unused = tuple(name for name in OF_THE_RUN if body.get(name) is not None)
    return Asked(body["model"], chat, tools, most_tokens, bool(body.get("stream")), True, unused)


def message(said: Said) -> dict[str, Any]:
    """The answer in one piece."""
    return _head(said) | {
        "content": _blocks(said),
        "stop_reason": STOP_REASONS[said.finish_reason],
        "usage": {"input_tokens": said.num_read, "output_tokens": said.num_said},
    }


def events(said: Said) -> Iterator[bytes]:
    """The answer as server-sent events: each block in one piece, as it is complete when it is known."""
    begun = {"content": [], "stop_reason": None, "usage": {"input_tokens": said.num_read, "output_tokens": 0}}
    yield _event("message_start", {"message": _head(said) | begun})
    for index, block in enumerate(_blocks(said)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            partial = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": partial}
        yield _event("content_block_start", {"index": index, "content_block": empty})
        yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    ended = {"stop_reason": STOP_REASONS[said.finish_reason], "stop_sequence": None}
    yield _event("message_delta", {"delta": ended, "usage": {"output_tokens": said.num_said}})
    yield _event("message_stop", {})


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
    content, calls = said.message["content"], said.message.get("tool_calls", [])
    blocks = [{"type": "text", "text": content}] if content or not calls else []
    for index, call in enumerate(calls):
        function = call["function"]
        block = {"type": "tool_use", "id": call_id(said.turn, index), "name": function["name"]}
        blocks.append({**block, "input": function["arguments"]})
    return blocks


def _messages(message: Any, where: str) -> Chat:
    """What a message of blocks is to a chat template."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise BadRequest(f"{where} has no role of user, assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise BadRequest(f"{where}: its content is {shown(content)}, neither text nor blocks")
    by_type: dict[str, list[dict[str, Any]]] = {"text": [], "tool_use": [], "tool_result": []}
    for block in blocks:
        if block.get("type") not in tuple(by_type):  # a list, say, is no key
            raise BadRequest(f"{where}: its content has {shown(block)}: there are text, and tools")
        by_type[block["type"]].append(block)
    text = text_of(by_type["text"], where) if by_type["text"] else ""
    if message["role"] == "assistant":
        calls = [_call(block, where) for block in by_type["tool_use"]]
        said = {"role": "assistant", "content": text.strip()}
        return [said | {"tool_calls": calls} if calls else said]
    results = [
        {"role": "tool", "content": text_of(block.get("content"), where)} for block in by_type["tool_result"]
    ]
    return [*results, {"role": "user", "content": text}] if by_type["text"] or not results else results


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise BadRequest(f"{where}: {shown(block)} is no call of a tool")
    return {"type": "function", "function": {"name": block["name"], "arguments": block["input"]}}


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tools in OpenAI's function format, as chat templates know them."""
    found = []
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
            raise BadRequest(f"tools[{index}] = {shown(tool)} is no tool with an input_schema")
        function = {"name": tool["name"], "description": tool.get("description", "")}
        found.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return tuple(found)
