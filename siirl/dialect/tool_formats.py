"""Formats in which models write tool calls: text in; what remains of it, calls, and errors in words out.

A parser never raises for anything that a model writes: what cannot be understood is an error for the model.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from siirl.errors import ConfigError
from siirl.user_code.load_object import load_object


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    as_text: bool = False
    """The values are texts, to be read by the tool's schema."""


@dataclass(frozen=True)
class MalformedCall:
    """What the model meant as a call, and why it is none: in words for the model."""

    reason: str


@dataclass(frozen=True)
class Parsed:
    """A turn taken apart."""

    content: str
    """Its text without calls."""
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    """In the order in which they were written."""


ToolParser = Callable[[str], Parsed]

TOOL_PARSERS: dict[str, ToolParser] = {}


def register_tool_parser(name: str) -> Callable[[ToolParser], ToolParser]:
    """Decorator: `rollout.multi_turn.format=name` is this function. ConfigError for a name that is taken."""

    def register(parser: ToolParser) -> ToolParser:
        if TOOL_PARSERS.setdefault(name, parser) is not parser:
            raise ConfigError(f"tool parser {name!r} is registered twice. Choose another name.")
        return parser

    return register


FORMAT = "actor_rollout_ref.rollout.multi_turn.format"


def tool_parser(name: str, key: str = FORMAT) -> ToolParser:
    """The parser of this name, or the function that "file.py:fn" or "pkg.mod:fn" names; else ConfigError.

    key: whose value it is.
    """
    if name in TOOL_PARSERS:
        return TOOL_PARSERS[name]
    if ":" in name:
        return load_object(name, key)
    raise ConfigError(
        f"{key}={name}: unknown. Choose one of {', '.join(TOOL_PARSERS)}, or name a function file.py:fn."
    )


@register_tool_parser("hermes")
def hermes(text: str) -> Parsed:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen models write it."""
    return _tagged(text, "<tool_call>", "</tool_call>", lambda body: _json_call(body, "arguments"))


@register_tool_parser("llama3_json")
def llama3_json(text: str) -> Parsed:
    """{"name": ..., "parameters": {...}} as the whole turn, several with ; between, as Llama 3 writes it."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return Parsed(text)
    decoder, calls = json.JSONDecoder(), []
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            calls.append(MalformedCall(f"the call is no JSON: {_short(error)}"))
            break
        calls.append(_call_of(value, "parameters"))
        body = body[end:].lstrip().removeprefix(";").lstrip()
    return Parsed("", tuple(calls))


@register_tool_parser("json")
def json_blocks(text: str) -> Parsed:
    """Fenced blocks that are marked as json and hold {"name": ..., "arguments": {...}}."""

    def call(body: str) -> ToolCall | MalformedCall | None:
        return _json_call(body, "arguments") if '"name"' in body else None

    return _tagged(text, "```json", "```", call)


FUNCTION = re.compile(r"\s*<function=([^>\s]*)\s*>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\s]*)\s*>(.*?)</parameter>", re.DOTALL)


@register_tool_parser("qwen3_coder")
def qwen3_coder(text: str) -> Parsed:
    """<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>, of Qwen3-Coder."""

    def call(body: str) -> ToolCall | MalformedCall:
        function = FUNCTION.fullmatch(body)
        if function is None or not function[1]:
            return MalformedCall("the call holds no <function=NAME> ... </function>")
        arguments: dict[str, Any] = {}
        for parameter in PARAMETER.finditer(function[2]):
            # the format puts each value on lines of its own
            arguments[parameter[1]] = parameter[2].removeprefix("\n").removesuffix("\n")
        if PARAMETER.sub("", function[2]).strip():
            return MalformedCall("the call holds text outside of <parameter=KEY> ... </parameter>")
        return ToolCall(function[1], arguments, as_text=True)

    return _tagged(text, "<tool_call>", "</tool_call>", call)


def _tagged(
    text: str, begin: str, end: str, read: Callable[[str], ToolCall | MalformedCall | None]
) -> Parsed:
    """Calls between marks. What `read` takes for no call remains text; an open mark is an error."""
    content, calls, at = [], [], 0
    while (start := text.find(begin, at)) >= 0:
        stop = text.find(end, start + len(begin))
        if stop < 0:
            calls.append(MalformedCall(f"{begin} is not closed by {end}"))
            content.append(text[at:start])
            at = len(text)
            break
        call = read(text[start + len(begin) : stop])
        kept = start if call is not None else stop + len(end)
        content.append(text[at:kept])
        calls += [call] if call is not None else []
        at = stop + len(end)
    content.append(text[at:])
    return Parsed("".join(content).strip() if calls else text, tuple(calls))


def _json_call(body: str, arguments_key: str) -> ToolCall | MalformedCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the call is no JSON: {_short(error)}")
    return _call_of(value, arguments_key)


def _call_of(value: Any, arguments_key: str) -> ToolCall | MalformedCall:
    """A call from {"name", "arguments" or "parameters"}; arguments may be JSON in a text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(f'a call is {{"name": "...", "{arguments_key}": {{...}}}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return MalformedCall(f"the arguments are no JSON: {_short(error)}")
    if not isinstance(arguments, dict):
        return MalformedCall(f'"{arguments_key}" is not a mapping of names to values')
    return ToolCall(value["name"], arguments)


def _short(error: Exception) -> str:
    return str(error)[:100]
