"""OpenAI's chat completions on the wire: what a program asks, and what it is answered. Pure.

Source of the format: the API reference of OpenAI, "Chat". Messages become those of chat templates: an
assistant's text without the spaces around it, as programs strip it, and the arguments of calls as a mapping.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from siirl.agents.episode import MOST_REWARD
from siirl.agents.outside.content import BadRequest, check_bounds, is_reward, parsed
from siirl.agents.outside.exchange import MOST_CHOICES, REASONING, Asked, Said, Token, Told, calls_of, usage
from siirl.agents.outside.parameters import flag, given, names, shown, stop_strings, whole_number
from siirl.agents.shown import content_of, read_shown
from siirl.dialect.tool_formats import Parsed, ToolCall, from_texts
from siirl.errors import DataError, EpisodeFailed

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ROLES |= {"tool": "tool", "function": "tool"}
ACTS = names(
    "model messages tools tool_choice max_tokens max_completion_tokens "
    "stream stop n logprobs return_token_ids"
)
CHOOSES = "the policy chooses whether it calls"
UNREWARDED = "program_unrewarded"
"""Kind of EpisodeFailed: there is no reward."""


def asked_of(body: Any) -> Asked:
    """The request that a JSON body is. BadRequest if it is none, or asks for what siirl does not do."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise BadRequest("a request is a JSON object with model and messages")
    unused = given(body, ACTS, {})
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice = {shown(choice)}: {CHOOSES}", "unsupported_parameter")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list of messages")
    most = whole_number(body, "max_completion_tokens") or whole_number(body, "max_tokens")
    return Asked(
        body["model"],
        [message_of(message, f"messages[{index}]") for index, message in enumerate(messages)],
        () if choice == "none" else _tools(body.get("tools")),
        most,
        flag(body, "stream"),
        with_usage(body),
        unused,
        stop_strings(body, "stop"),
        whole_number(body, "n", MOST_CHOICES) or 1,
        flag(body, "logprobs"),
        flag(body, "return_token_ids"),
    )


def with_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream shall end with the number of tokens."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


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


def arguments_of(call: Mapping[str, Any]) -> str:
    """The arguments of a call as OpenAI writes them."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _on_the_wire(said: Said) -> dict[str, Any]:
    """The message as programs get it."""
    message: dict[str, Any] = {"role": "assistant", "content": said.message["content"]}
    if said.reasoning is not None:
        message[REASONING] = said.reasoning.strip()
    if not (calls := calls_of(said.message)):
        return message
    made = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": arguments_of(call)},
        }
        for call in calls
    ]
    return message | {"content": message["content"] or None, "tool_calls": made}


def completion(answer: Sequence[Said], created: int) -> dict[str, Any]:
    """The answer in one piece."""
    choices = [choice_of(said, index, {"message": _on_the_wire(said)}) for index, said in enumerate(answer)]
    return head(answer, created, "chat.completion") | {"choices": choices, "usage": usage(answer)}


def choice_of(said: Said, index: int, what: dict[str, Any], ended: bool = True) -> dict[str, Any]:
    """A choice, or a part of it. ended: it is the last part."""
    log_probs = {"content": [log_prob(token) for token in said.tokens], "refusal": None}
    choice = {"index": index, **what, "finish_reason": said.finish_reason if ended else None}
    choice["logprobs"] = log_probs if said.tokens and said.with_log_probs else None
    if ended:
        choice["stop_reason"] = said.stop  # as vLLM does
    return choice | ({"token_ids": [token.id for token in said.tokens]} if said.read_ids else {})


def log_prob(token: Token) -> dict[str, Any]:
    """A sampled token as OpenAI writes it."""
    bytes_ = list(token.text.encode(errors="replace"))
    return {"token": token.text, "logprob": token.log_prob, "bytes": bytes_, "top_logprobs": []}


class Stream:
    """The answer as server-sent events (an AnswerStream): texts as they come, each call in one piece."""

    def __init__(self, created: int, with_usage: bool) -> None:
        self._created, self._with_usage = created, with_usage
        self._head: dict[str, Any] | None = None
        self._told: defaultdict[int, Told] = defaultdict(Told)

    def more(self, index: int, said: Said) -> Iterator[bytes]:
        """See AnswerStream."""
        self._begun(said)
        reasoning, content = self._told[index].more(said)
        if reasoning:
            yield self._chunk(said, index, {"delta": {"role": "assistant", REASONING: reasoning}})
        if content:
            yield self._chunk(said, index, {"delta": {"role": "assistant", "content": content}})

    def end(self, answer: Sequence[Said]) -> Iterator[bytes]:
        """See AnswerStream. What is known of tokens comes with the last thing that is said."""
        for index, said in enumerate(answer):
            *deltas, last = list(_deltas(said, self._told[index])) or [{"role": "assistant", "content": ""}]
            for delta in deltas:
                yield self._chunk(said, index, {"delta": delta})
            yield event(self._begun(said) | {"choices": [choice_of(said, index, {"delta": last}, False)]})
            ended = choice_of(said.without_tokens(), index, {"delta": {}})
            yield event(self._begun(said) | {"choices": [ended]})
        if self._with_usage:
            yield event(self._begun(answer[0]) | {"choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def _begun(self, said: Said) -> dict[str, Any]:
        self._head = self._head or head([said], self._created, "chat.completion.chunk")
        return self._head

    def _chunk(self, said: Said, index: int, what: dict[str, Any]) -> bytes:
        choice = choice_of(said.without_tokens(), index, what, False)
        return event(self._begun(said) | {"choices": [choice]})


def _deltas(said: Said, told: Told) -> Iterator[dict[str, Any]]:
    """What a stream says of a complete message besides what it has told, one thing at a time."""
    message, before = _on_the_wire(said), replace(told)
    reasoning, content = told.more(said)
    if REASONING in message and (reasoning or not before.reasoning):
        yield {"role": "assistant", REASONING: reasoning}
    if content or not (before.answer or "tool_calls" in message):
        yield {"role": "assistant", "content": content}
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"role": "assistant", "tool_calls": [{"index": index, **call}]}


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


def head(answer: Sequence[Said], created: int, kind: str, prefix: str = "chatcmpl") -> dict[str, Any]:
    """What stands beside the choices of an answer."""
    first = answer[0]
    made = {"id": f"{prefix}-{first.key}", "object": kind, "created": created, "model": first.model}
    return made | ({"prompt_token_ids": list(first.read_ids)} if first.read_ids else {})


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def message_of(message: Any, where: str) -> dict[str, Any]:
    """A message as templates have it. BadRequest, which begins with `where`, if it is none."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{where} has no role of {', '.join(ROLES)}")
    role = ROLES[role]
    content = content_on(message.get("content"), where)
    if role == "tool":
        return {"role": role, "content": content} | _named(message, where, "name", "tool_call_id")
    if role != "assistant":
        return {"role": role, "content": content}
    if not isinstance(content, str):
        raise BadRequest(f"{where}: an assistant says texts, no images")
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        raise BadRequest(f"{where} has function_call: write tool_calls")
    if not isinstance(calls, list):
        raise BadRequest(f"{where}: tool_calls is no list")
    made = [call_of(call, f"{where}: tool_calls[{index}]") for index, call in enumerate(calls)]
    thought = message.get(REASONING, message.get("reasoning"))
    return assistant(content, made, text_of(thought, where))


def assistant(content: str, calls: Sequence[dict[str, Any]], reasoning: str) -> dict[str, Any]:
    """A message of the assistant as templates have it."""
    said: dict[str, Any] = {"role": "assistant", "content": content.strip()}
    if calls:
        said["tool_calls"] = list(calls)
    return said | ({REASONING: reasoning.strip()} if reasoning.strip() else {})


def _named(message: Mapping[str, Any], where: str, *names: str) -> dict[str, str]:
    """Texts that a message may have. BadRequest for one that is none."""
    found = {name: message[name] for name in names if message.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, str):
            raise BadRequest(f"{where}: {name} = {shown(value)} is no text")
    return found


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
    return _named(call, where, "id") | {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


IMAGES = ("image_url", "input_image", "image")
"""Types of parts that are images, on the wires."""


def content_on(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a message: its text, or parts where it has images. BadRequest for anything else."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") in IMAGES for part in parts):
        return text_of(content, where)
    made = [
        {"type": "image", "image": _data_url(part, where)}
        if isinstance(part, dict) and part.get("type") in IMAGES
        else {"type": "text", "text": text_of([part], where)}
        for part in parts
    ]
    try:
        held = read_shown(made)
    except (DataError, ValueError) as error:
        raise BadRequest(f"{where}: {error}") from error
    return content_of(held.text, held.images)


def _data_url(part: Mapping[str, Any], where: str) -> str:
    """The image of a part, which has to be in it: nothing is fetched for a program, nor read from a disk."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise BadRequest(f"{where}: an image is {shown(url)}: give it as data:image/...;base64,...")
    return url


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
