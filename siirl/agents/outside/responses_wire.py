"""OpenAI's responses on the wire: what a program asks, and what it is answered. Pure.

Source of the format: the API reference of OpenAI, "Responses". Items become messages of chat templates: calls
belong to the message of the assistant before them. No answer is kept: a request has the whole conversation.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from siirl.agents.contexts import Chat
from siirl.agents.outside.chat_wire import Asked, Said, call_id, call_of, message_of, shown, text_of
from siirl.agents.outside.content import BadRequest, refuse

_STATELESS = "no answer is kept here. Send the whole conversation as input"
REFUSED = {
    "previous_response_id": (None, _STATELESS),
    "conversation": (None, _STATELESS),
    "prompt": (None, "no prompts are kept here. Send them as input"),
    "background": (False, "an answer is waited for"),
    "truncation": ("disabled", "what is read is trained on as it is"),
    "top_logprobs": (0, "log-probs stay with siirl"),
}
"""Parameter -> (the value besides null that is taken, why another one is refused)."""
OF_THE_RUN = ("temperature", "top_p", "reasoning")


def asked_of(body: Any) -> Asked:
    """The request that a JSON body is. BadRequest if it is none, or asks for what siirl does not do."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise BadRequest("a request is a JSON object with model and input")
    refuse(body, REFUSED)
    form = (
        (body.get("text") or {}).get("format") if isinstance(body.get("text"), dict | None) else body["text"]
    )
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise BadRequest(f"text.format = {shown(form)}: answers are text", "unsupported_parameter")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice = {shown(choice)}: the policy chooses", "unsupported_parameter")
    chat: Chat = []
    if body.get("instructions"):
        chat.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    chat += _messages(body.get("input"))
    tools = () if choice == "none" else _tools(body.get("tools"))
    unused = tuple(name for name in OF_THE_RUN if body.get(name) is not None)
    return Asked(body["model"], chat, tools, _most_tokens(body), bool(body.get("stream")), True, unused)


def response(said: Said, created: int) -> dict[str, Any]:
    """The answer in one piece."""
    cut = said.finish_reason == "length"
    usage = {
        "input_tokens": said.num_read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": said.num_said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.num_read + said.num_said,
    }
    return _head(said, created) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(said),
        "usage": usage,
    }


def events(said: Said, created: int) -> Iterator[bytes]:
    """The answer as server-sent events: each item in one piece, as it is complete when it is known."""
    whole, begun = response(said, created), _head(said, created)
    parts = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
    for index, item in enumerate(whole["output"]):
        parts += _parts(item, index)
    parts.append((f"response.{whole['status']}", {"response": whole}))
    for number, (name, value) in enumerate(parts):
        data = json.dumps({"type": name, "sequence_number": number, **value})
        yield f"event: {name}\ndata: {data}\n\n".encode()


def _parts(item: dict[str, Any], index: int) -> list[tuple[str, dict[str, Any]]]:
    """What a stream says of an item of the output."""
    where = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        empty, name = {"arguments": ""}, "response.function_call_arguments"
        said = [
            (f"{name}.delta", where | {"delta": item["arguments"]}),
            (f"{name}.done", where | {"arguments": item["arguments"], "name": item["name"]}),
        ]
    else:
        empty, place, part = {"content": []}, where | {"content_index": 0}, item["content"][0]
        said = [
            ("response.content_part.added", place | {"part": part | {"text": ""}}),
            ("response.output_text.delta", place | {"delta": part["text"], "logprobs": []}),
            ("response.output_text.done", place | {"text": part["text"], "logprobs": []}),
            ("response.content_part.done", place | {"part": part}),
        ]
    begun = item | {"status": "in_progress"} | empty
    added = ("response.output_item.added", {"output_index": index, "item": begun})
    return [added, *said, ("response.output_item.done", {"output_index": index, "item": item})]


def _head(said: Said, created: int) -> dict[str, Any]:
    """What is known before the output."""
    of_request = dict.fromkeys(
        ("error", "incomplete_details", "instructions", "temperature", "top_p", "usage")
    )
    return of_request | {
        "id": f"resp_{said.key}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "model": said.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "store": False,
    }


def _items(said: Said) -> list[dict[str, Any]]:
    content, calls = said.message["content"], said.message.get("tool_calls", [])
    status = "incomplete" if said.finish_reason == "length" else "completed"
    part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
    head = {"type": "message", "id": f"msg_{said.key}", "role": "assistant", "status": status}
    items: list[dict[str, Any]] = [head | {"content": [part]}] if content or not calls else []
    for index, call in enumerate(calls):
        name, function = call_id(said.turn, index), call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        made = {"type": "function_call", "id": f"fc_{name}", "call_id": name, "status": "completed"}
        items.append(made | {"name": function["name"], "arguments": arguments})
    return items


def _messages(given: Any) -> Chat:
    """What the input is to a chat template."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input is neither a text nor a list of items")
    chat: Chat = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            chat.append(message_of({"role": item.get("role"), "content": item.get("content")}, where))
        elif kind == "function_call_output":
            chat.append({"role": "tool", "content": text_of(item.get("output"), where)})
        elif kind == "function_call":
            _add_call(chat, call_of({"function": item}, where), given[index - 1] if index else {})
        else:
            raise BadRequest(f"{where} = {shown(item)}: there are messages, and calls of functions")
    return chat


def _add_call(chat: Chat, call: dict[str, Any], before: Mapping[str, Any]) -> None:
    """A call is part of what the assistant has said just before, in a message or in other calls."""
    goes_on = before.get("type") == "function_call" or before.get("role") == "assistant"
    if not goes_on:
        chat.append({"role": "assistant", "content": ""})
    chat[-1] = chat[-1] | {"tool_calls": [*chat[-1].get("tool_calls", []), call]}


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tools in the format of chat completions, as chat templates know them."""
    if not isinstance(tools, list | None):
        raise BadRequest(f"tools = {shown(tools)} is no list")
    found = []
    for index, tool in enumerate(tools or []):
        is_function = isinstance(tool, dict) and tool.get("type") == "function"
        if not is_function or not isinstance(tool.get("name"), str):
            raise BadRequest(f"tools[{index}] = {shown(tool)} is no function")
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return tuple(found)


def _most_tokens(body: Mapping[str, Any]) -> int | None:
    value = body.get("max_output_tokens")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise BadRequest(f"max_output_tokens = {shown(value)} is no whole number of at least 1")
    return value
