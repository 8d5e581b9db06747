"""OpenAI's chat completions on the wire: what a program asks, and what it is answered. Pure.

Source of the format: the API reference of OpenAI, "Chat". Messages become those of chat templates: an
assistant's text without the spaces around it, as programs strip it, and the arguments of calls as a mapping.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from siirl.agents.contexts import Chat
from siirl.agents.episode import MOST_REWARD
from siirl.agents.outside.content import ENDS, BadRequest, check_bounds, is_reward, parsed, refuse
from siirl.dialect.tool_formats import Parsed, ToolCall, from_texts
from siirl.errors import EpisodeFailed

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ROLES |= {"tool": "tool", "function": "tool"}
REFUSED = {
    "n": (1, "one answer is sampled for a request. Send several requests"),
    "stop": ([], ENDS),
    "logprobs": (False, "log-probs stay with siirl"),
    "logit_bias": ({}, "log-probs would not be the policy's"),
    "audio": (None, "there is text only"),
}
"""Parameter -> (the value besides null that is taken, why another one is refused)."""
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty")
UNREWARDED = "program_unrewarded"
"""Kind of EpisodeFailed: there is no reward."""
OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed", *PENALTIES)
"""Parameters that the run's configuration says, whatever a program asks."""


@dataclass(frozen=True)
class Asked:
    """A request for a turn."""

    model: str
    messages: Chat
    tools: tuple[dict[str, Any], ...]
    most_tokens: int | None
    """None: as many as the run allows."""
    streams: bool
    with_usage: bool
    """A stream ends with the number of tokens."""
    unused: tuple[str, ...]
    """Parameters that were set and change nothing."""


@dataclass(frozen=True)
class Said:
    """The answer to a request."""

    key: str
    model: str
    turn: int
    message: dict[str, Any]
    """As templates have it: see as_message."""
    finish_reason: str
    """ "stop", "length" or "tool_calls"."""
    num_read: int
    num_said: int
    reasoning: str | None = None
    """What the model thought before, if it did."""

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens."""
        return {
            "prompt_tokens": self.num_read,
            "completion_tokens": self.num_said,
            "total_tokens": self.num_read + self.num_said,
        }


def asked_of(body: Any) -> Asked:
    """The request that a JSON body is. BadRequest if it is none, or asks for what siirl does not do."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise BadRequest("a request is a JSON object with model and messages")
    refuse(body, REFUSED)
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise BadRequest(f"response_format = {shown(form)}: answers are text", "unsupported_parameter")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice = {shown(choice)}: the policy chooses", "unsupported_parameter")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list of messages")
    options = body.get("stream_options")
    return Asked(
        body["model"],
        [message_of(message, f"messages[{index}]") for index, message in enumerate(messages)],
        () if choice == "none" else _tools(body.get("tools")),
        _most_tokens(body),
        bool(body.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
        tuple(name for name in OF_THE_RUN if body.get(name) is not None),
    )


def as_message(turn: Parsed, text: str, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """A turn as a message for templates. turn: its text taken apart; calls count if there are tools.

    A turn with a call that cannot be understood, or that no request could repeat, is text as a whole.
    """
    calls = [call for call in turn.calls if isinstance(call, ToolCall)]
    if not tools or not calls or len(calls) < len(turn.calls):
        return {"role": "assistant", "content": text.strip()}
    schemas = {tool["function"]["name"]: tool for tool in tools}
    made = []
    for call in calls:
        arguments = call.arguments
        if call.as_text and call.name in schemas:
            arguments = from_texts(arguments, schemas[call.name])
        made.append({"type": "function", "function": {"name": call.name, "arguments": arguments}})
    try:
        check_bounds(made, "the calls")
    except BadRequest:
        return {"role": "assistant", "content": text.strip()}
    return {"role": "assistant", "content": turn.content.strip(), "tool_calls": made}


def call_id(turn: int, index: int) -> str:
    """The name of a call: nine characters, as Mistral wants."""
    return f"c{turn:06d}{index:02d}"


def _on_the_wire(said: Said) -> dict[str, Any]:
    """The message as programs get it."""
    message = said.message
    thought = {} if said.reasoning is None else {"reasoning_content": said.reasoning.strip()}
    if "tool_calls" not in message:
        return {"role": "assistant", "content": message["content"], **thought}
    calls = [
        {
            "id": call_id(said.turn, index),
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for index, call in enumerate(message["tool_calls"])
    ]
    return {"role": "assistant", "content": message["content"] or None, **thought, "tool_calls": calls}


def completion(said: Said, created: int) -> dict[str, Any]:
    """The answer in one piece."""
    choice = {
        "index": 0,
        "message": _on_the_wire(said),
        "finish_reason": said.finish_reason,
        "logprobs": None,
    }
    return _head(said, created, "chat.completion") | {"choices": [choice], "usage": said.usage}


def chunks(said: Said, created: int, with_usage: bool) -> Iterator[bytes]:
    """The answer as server-sent events: the turn in one piece, as it is complete when it is known."""
    head = _head(said, created, "chat.completion.chunk")
    delta = _on_the_wire(said)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    parts = ((delta, None), ({}, said.finish_reason))
    for delta, reason in parts:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        yield _event(head | {"choices": [choice]})
    if with_usage:
        yield _event(head | {"choices": [], "usage": said.usage})
    yield b"data: [DONE]\n\n"


def error_body(text: str, code: str) -> dict[str, Any]:
    """An error as clients read it."""
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}


def returned_reward(value: Any, models: Mapping[str, int]) -> dict[int, float] | float:
    """What a function returns, as reward_of gives it; truth is 1. EpisodeFailed for anything else."""
    if isinstance(value, bool):
        return float(value)
    try:
        return reward_of({"rewards" if isinstance(value, dict) else "reward": value}, models)
    except BadRequest as error:
        raise EpisodeFailed(f"its program returned {error}", UNREWARDED) from None


def reward_of(body: Any, models: Mapping[str, int]) -> dict[int, float] | float:
    """What a program gives at the end: {"reward": number}, or {"rewards": {model: number}}; by agent.

    models: name -> agent. BadRequest for anything else.
    """
    if isinstance(body, dict) and set(body) == {"reward"} and is_reward(body["reward"]):
        return float(body["reward"])
    rewards = body.get("rewards") if isinstance(body, dict) and set(body) == {"rewards"} else None
    if not isinstance(rewards, dict) or not rewards or not all(map(is_reward, rewards.values())):
        raise BadRequest(
            f'{shown(body)} is no reward: write {{"reward": a number within {MOST_REWARD:g}}}, or '
            f'{{"rewards": {{one of {", ".join(models)}: number}}}}'
        )
    unknown = [name for name in rewards if name not in models]
    if unknown:
        raise BadRequest(f"rewards of {shown(unknown[0])}: there are {', '.join(models)}")
    return {models[name]: float(value) for name, value in rewards.items()}


def _head(said: Said, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{said.key}", "object": kind, "created": created, "model": said.model}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def message_of(message: Any, where: str) -> dict[str, Any]:
    """A message as templates have it. BadRequest, which begins with `where`, if it is none."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{where} has no role of {', '.join(ROLES)}")
    role = ROLES[role]
    content = text_of(message.get("content"), where)
    if role != "assistant":
        return {"role": role, "content": content}
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        raise BadRequest(f"{where} has function_call: write tool_calls")
    if not isinstance(calls, list):
        raise BadRequest(f"{where}: tool_calls is no list")
    made = [call_of(call, f"{where}: tool_calls[{index}]") for index, call in enumerate(calls)]
    said = {"role": role, "content": content.strip()}
    return said | {"tool_calls": made} if made else said


def call_of(call: Any, where: str) -> dict[str, Any]:
    """A call of a function as templates have it, its arguments a mapping. BadRequest if it is none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} is no call of a function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"{where}: arguments = {shown(arguments)}")
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}: arguments = {shown(arguments)} is no object")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def text_of(content: Any, where: str) -> str:
    """The text of a message's content, which may be a list of parts. BadRequest for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}: its content is {shown(part)}: there is text only")
        texts.append(part["text"])
    return "\n".join(texts)


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    found = tools if tools is not None else []
    if not isinstance(found, list):
        raise BadRequest(f"tools = {shown(tools)} is no list")
    for index, tool in enumerate(found):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{index}] = {shown(tool)} is no function")
    return tuple(found)


def _most_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} = {shown(value)} is no whole number of at least 1")
        return value
    return None


def shown(value: Any) -> str:
    """A value of a request in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
