"""OpenAI's responses on the wire: what a program asks, and what it is answered. Pure.

Source of the format: the API reference of OpenAI, "Responses". Items become messages of chat templates: calls
belong to the message of the assistant before them. No answer is kept: a request has the whole conversation.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from siirl.agents.contexts import Chat
from siirl.agents.outside.chat_wire import (
    CHOOSES,
    arguments_of,
    assistant,
    call_of,
    content_on,
    log_prob,
    message_of,
    text_of,
)
from siirl.agents.outside.content import BadRequest
from siirl.agents.outside.exchange import Asked, Said, calls_of
from siirl.agents.outside.parameters import (
    CONSTRAINED,
    TEMPLATE,
    flag,
    given,
    names,
    shown,
    stop_strings,
    whole_number,
)

ACTS = names(
    "model input instructions tools tool_choice max_output_tokens stream stop include text reasoning"
)
_STATELESS = "no answer is kept here. Send the whole conversation as input"
REFUSED = {
    "previous_response_id": (None, _STATELESS),
    "conversation": (None, _STATELESS),
    "prompt": (None, "no prompts are kept here. Send them as input"),
    "background": (False, "an answer is waited for"),
}
LOG_PROBS = "message.output_text.logprobs"
"""What `include` has where log-probs are wanted; its other values name what is not in answers here."""


def asked_of(body: Any) -> Asked:
    """The request that a JSON body is. BadRequest if it is none, or asks for what siirl does not do."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise BadRequest("a request is a JSON object with model and input")
    unused = given(body, ACTS, REFUSED)
    _check_inside(
        body, "text", {"format": ({"type": "text"}, CONSTRAINED), "verbosity": ("medium", TEMPLATE)}
    )
    _check_inside(body, "reasoning", {"effort": (None, TEMPLATE)})
    choice, include = body.get("tool_choice") or "auto", body.get("include") or []
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice = {shown(choice)}: {CHOOSES}", "unsupported_parameter")
    if not isinstance(include, list):
        raise BadRequest(f"include = {shown(include)} is no list")
    chat: Chat = []
    if body.get("instructions"):
        chat.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    chat += _messages(body.get("input"))
    return Asked(
        body["model"],
        chat,
        () if choice == "none" else _tools(body.get("tools")),
        whole_number(body, "max_output_tokens"),
        flag(body, "stream"),
        unused=unused,
        stop=stop_strings(body, "stop"),
        with_log_probs=LOG_PROBS in include,
    )


def _check_inside(body: Mapping[str, Any], name: str, parts: Mapping[str, tuple[Any, str]]) -> None:
    """BadRequest for a part of a parameter with a value that is not taken."""
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise BadRequest(f"{name} = {shown(value)} is no object")
    for part, (taken, why) in parts.items():
        if (found := (value or {}).get(part)) not in (None, taken):
            raise BadRequest(f"{name}.{part} = {shown(found)}: {why}", "unsupported_parameter")


def response(answer: Sequence[Said], created: int) -> dict[str, Any]:
    """The answer in one piece."""
    (said,) = answer
    cut = said.finish_reason == "length"
    usage = {
        "input_tokens": said.num_read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": said.num_said,
        "output_tokens_details": {"reasoning_tokens": said.num_reasoned},
        "total_tokens": said.num_read + said.num_said,
    }
    return _head(said, created) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(said),
        "usage": usage,
    }


def events(answer: Sequence[Said], created: int, with_usage: bool) -> Iterator[bytes]:
    """The answer as server-sent events: each item in one piece, as it is complete when it is known."""
    whole, begun = response(answer, created), _head(answer[0], created)
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
    elif item["type"] == "reasoning":
        empty, place, part = {"content": []}, where | {"content_index": 0}, item["content"][0]
        said = [
            ("response.reasoning_text.delta", place | {"delta": part["text"]}),
            ("response.reasoning_text.done", place | {"text": part["text"]}),
        ]
    else:
        empty, place, part = {"content": []}, where | {"content_index": 0}, item["content"][0]
        said = [
            ("response.content_part.added", place | {"part": part | {"text": ""}}),
            ("response.output_text.delta", place | {"delta": part["text"], "logprobs": part["logprobs"]}),
            ("response.output_text.done", place | {"text": part["text"], "logprobs": part["logprobs"]}),
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
    content, calls = said.message["content"], calls_of(said.message)
    status = "incomplete" if said.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if said.reasoning is not None:
        thought = {"type": "reasoning", "id": f"rs_{said.key}", "summary": [], "status": status}
        items.append(thought | {"content": [{"type": "reasoning_text", "text": said.reasoning.strip()}]})
    log_probs = [log_prob(token) for token in said.tokens]
    part = {"type": "output_text", "text": content, "annotations": [], "logprobs": log_probs}
    head = {"type": "message", "id": f"msg_{said.key}", "role": "assistant", "status": status}
    items += [head | {"content": [part]}] if content or not calls else []
    for index, call in enumerate(calls):
        made = {"type": "function_call", "id": f"fc_{said.key}_{index}", "call_id": call["id"]}
        made |= {"name": call["function"]["name"], "arguments": arguments_of(call), "status": "completed"}
        items.append(made)
    return items


def _messages(given: Any) -> Chat:
    """What the input is to a chat template: what the assistant says between two others is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input is neither a text nor a list of items")
    chat: Chat = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            chat.append(assistant("", (), _reasoning(item, where)))
            continue
        goes_on = bool(index) and chat[-1]["role"] == "assistant"
        if kind == "message":
            message = message_of({"role": item.get("role"), "content": item.get("content")}, where)
            opened = goes_on and given[index - 1].get("type") == "reasoning"
            chat[-1:] = (
                [chat[-1] | message] if opened and message["role"] == "assistant" else [*chat[-1:], message]
            )
        elif kind == "function_call_output":
            chat.append(_result(item, where))
        elif kind == "function_call":
            call = call_of({"function": item} | ({"id": item["call_id"]} if "call_id" in item else {}), where)
            said = chat.pop() if goes_on else {"role": "assistant", "content": ""}
            chat.append(said | {"tool_calls": [*calls_of(said), call]})
        else:
            raise BadRequest(
                f"{where} = {shown(item)}: there are messages, reasoning, and calls of functions"
            )
    return chat


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The text of an item of reasoning; "" where a program has kept none of it."""
    return text_of(item.get("content") or item.get("summary"), where)


def _result(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The answer of a function."""
    made = {"role": "tool", "content": content_on(item.get("output"), where)}
    if not isinstance(id := item.get("call_id"), str | None):
        raise BadRequest(f"{where}: call_id = {shown(id)} is no text")
    return made if id is None else made | {"tool_call_id": id}


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
