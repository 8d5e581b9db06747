"""OpenAI's responses on the wire: what a program asks, and what it is answered. Pure.

Source of the format: the API reference of OpenAI, "Responses". Items become messages of chat templates: calls
belong to the message of the assistant before them. No answer is kept: a request has the whole conversation.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from siirl.agents.outside.exchange import Asked, Said, Told, calls_of
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


class Stream:
    """The answer as server-sent events (an AnswerStream): texts as they come, each call in one piece.

    Reasoning after an answer has begun is told at the end.
    """

    def __init__(self, created: int, with_usage: bool) -> None:
        self._created, self._number, self._told = created, 0, Told()
        self._begun: list[dict[str, Any]] = []
        """Items of the output; all but the last are done."""

    def more(self, index: int, said: Said) -> Iterator[bytes]:
        """See AnswerStream."""
        if self._told.answer:
            said = replace(said, reasoning=self._told.reasoning)
        thought, text = self._told.more(said)
        for item in _items(said):
            if new := {"reasoning": thought, "message": text}[item["type"]]:
                yield from self._say(said, item, new)

    def end(self, answer: Sequence[Said]) -> Iterator[bytes]:
        """See AnswerStream. What is known of tokens comes with the last text."""
        (said,), whole = answer, response(answer, self._created)
        thought, text = self._told.more(said)
        for item in whole["output"]:
            kind = item["type"]
            if kind == "function_call":
                yield from self._say(said, item, item["arguments"])
                continue
            new, tokens = (thought, ()) if kind == "reasoning" else (text, said.tokens)
            if new or tokens or item["id"] not in [one["id"] for one in self._begun]:
                yield from self._say(said, item, new)
        for item in whole["output"]:
            if self._begun[-1]["id"] == item["id"]:
                yield from self._close(item)
        yield self._event(f"response.{whole['status']}", {"response": whole})

    def _say(self, said: Said, item: dict[str, Any], new: str) -> Iterator[bytes]:
        """Add to an item; a new one ends the one before it."""
        if not self._begun:
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, {"response": _head(said, self._created)})
        ids = [one["id"] for one in self._begun]
        if item["id"] not in ids:
            if self._begun:
                yield from self._close(self._begun[-1])
            ids.append(item["id"])
            empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            begun = item | {"status": "in_progress"} | empty
            place = {"output_index": len(ids) - 1}
            yield self._event("response.output_item.added", place | {"item": begun})
            self._begun.append(item)
            if item["type"] == "message":
                part = item["content"][0] | {"text": "", "logprobs": []}
                where = {"item_id": item["id"], **place, "content_index": 0}
                yield self._event("response.content_part.added", where | {"part": part})
        at = ids.index(item["id"])
        self._begun[at] = item
        name, where = _named_delta(item, at)
        more = {"logprobs": item["content"][0]["logprobs"]} if item["type"] == "message" else {}
        yield self._event(f"{name}.delta", where | {"delta": new} | more)

    def _close(self, item: dict[str, Any]) -> Iterator[bytes]:
        """End the last item."""
        at = len(self._begun) - 1
        name, where = _named_delta(item, at)
        if item["type"] == "function_call":
            yield self._event(f"{name}.done", where | {"arguments": item["arguments"], "name": item["name"]})
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"{name}.done", where | {"text": part["text"]} | more)
            if item["type"] == "message":
                yield self._event("response.content_part.done", where | {"part": part})
        yield self._event("response.output_item.done", {"output_index": at, "item": item})

    def _event(self, name: str, value: dict[str, Any]) -> bytes:
        data = json.dumps({"type": name, "sequence_number": self._number, **value})
        self._number += 1
        return f"event: {name}\ndata: {data}\n\n".encode()


def _named_delta(item: Mapping[str, Any], index: int) -> tuple[str, dict[str, Any]]:
    """What events about the text of an item are called, and where they say that it is."""
    where = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        return "response.function_call_arguments", where
    kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
    return f"response.{kind}", where | {"content_index": 0}


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
