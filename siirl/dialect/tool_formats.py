"""Formats in which models write tool calls, by name, and which of them a chat template writes.

A reader takes the raw text of a turn, special tokens kept, its reasoning already split off. It never raises
for anything that a model writes: what cannot be understood is an error for the model.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from siirl.dialect.formats import channels, json_calls, python_calls, tagged_calls
from siirl.dialect.formats.call_marks import Call, MalformedCall, Parsed, ToolCall
from siirl.dialect.formats.literals import from_texts
from siirl.errors import ConfigError
from siirl.user_code.load_object import load_object

__all__ = [
    "FORMAT",
    "TOOL_FORMATS",
    "Call",
    "MalformedCall",
    "Parsed",
    "ToolCall",
    "ToolParser",
    "format_of",
    "from_texts",
    "register_tool_parser",
    "tool_parser",
]

ToolParser = Callable[[str], Parsed]

TOOL_FORMATS: dict[str, ToolParser] = {
    "hermes": json_calls.hermes,
    "seed_oss": tagged_calls.seed_oss,
    "qwen3_coder": tagged_calls.qwen3_coder,
    "glm": tagged_calls.glm,
    "hy3": tagged_calls.hy3,
    "mistral": json_calls.mistral,
    "gpt_oss": channels.gpt_oss,
    "muse": channels.muse,
    "functionary_v32": channels.functionary_v32,
    "functionary_v31": json_calls.functionary_v31,
    "deepseek_v3": json_calls.deepseek_v3,
    "deepseek_dsml": tagged_calls.deepseek_dsml,
    "minimax_m2": tagged_calls.minimax_m2,
    "minimax_m3": tagged_calls.minimax_m3,
    "minicpm": tagged_calls.minicpm,
    "kimi_k2": json_calls.kimi_k2,
    "kimi_k3": tagged_calls.kimi_k3,
    "gemma4": python_calls.gemma4,
    "lfm2": python_calls.lfm2,
    "command_a": json_calls.command_a,
    "command_r": json_calls.command_r,
    "tool_calls": json_calls.tool_calls,
    "nemotron": json_calls.nemotron,
    "granite": json_calls.granite,
    "functools": json_calls.functools,
    "gigachat": json_calls.gigachat,
    "longcat": json_calls.longcat,
    "internlm": json_calls.internlm,
    "granite_fc": json_calls.granite_fc,
    "olmo3": python_calls.olmo3,
    "functiongemma": python_calls.functiongemma,
    "step3": tagged_calls.step3,
    "apertus": json_calls.apertus,
    "solar": json_calls.solar,
    "json": json_calls.json_blocks,
    "pythonic": python_calls.pythonic,
    "llama3_json": python_calls.llama3_json,
}
"""In the order in which format_of tries them: what reads calls without marks of their own comes last."""
BEGINS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "seed_oss": ("<seed:tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function=", "</tool_call>"),
    "glm": ("<tool_call>",),
    "hy3": ("<tool_calls",),
    "mistral": ("[TOOL_CALLS]",),
    "functionary_v31": ("<function=",),
    "deepseek_v3": ("<｜tool▁call",),
    "deepseek_dsml": ("<｜DSML｜",),
    "minimax_m2": ("<minimax:tool_call>",),
    "minimax_m3": ("]<]minimax[>[",),
    "minicpm": ("<function name=",),
    "kimi_k2": ("<|tool_call",),
    "kimi_k3": ("<|",),
    "gemma4": ("<|tool_",),
    "lfm2": ("<|tool_call_start|>",),
    "command_a": ("<|START_", "<|END_"),
    "command_r": ("Action:",),
    "tool_calls": ("<tool_calls>",),
    "nemotron": ("<TOOLCALL>",),
    "granite": ("<|tool_call|>", "<tool_call>"),
    "functools": ("functools[",),
    "gigachat": ("<|function_call|>", "function call<|role_sep|>", "<|message_sep|>"),
    "longcat": ("<longcat_tool_call>",),
    "internlm": ("<|action_start|>",),
    "granite_fc": ("<function_call>",),
    "olmo3": ("<function_calls>",),
    "functiongemma": ("<start_function_",),
    "step3": ("<｜tool_call",),
    "apertus": ("<|tools_prefix|>", "<|inner_"),
    "solar": ("<|tool_call", "<|content|>", "<|calls|>"),
    "json": ("```json",),
}
"""Format -> texts before the first of which a turn is its content as it stands. Others have none."""


def call_begins(parse: ToolParser) -> tuple[str, ...] | None:
    """What stands of these for a parser; () for text_alone; None where it is not known."""
    if parse is text_alone:
        return ()
    return next((BEGINS.get(name) for name, one in TOOL_FORMATS.items() if one is parse), None)


AUTO = "auto"
"""The format of the model's dialect."""


def register_tool_parser(name: str) -> Callable[[ToolParser], ToolParser]:
    """Decorator: `rollout.multi_turn.format=name` is this function. ConfigError for a name that is taken."""

    def register(parser: ToolParser) -> ToolParser:
        if TOOL_FORMATS.setdefault(name, parser) is not parser:
            raise ConfigError(f"tool parser {name!r} is registered twice. Choose another name.")
        return parser

    return register


def text_alone(text: str) -> Parsed:
    """No calls: what a model writes where it was told of no tools."""
    return Parsed(text)


FORMAT = "actor_rollout_ref.rollout.multi_turn.format"


def tool_parser(name: str, key: str = FORMAT, dialect: str | None = None) -> ToolParser:
    """The parser of this name, or the function that "file.py:fn" or "pkg.mod:fn" names; else ConfigError.

    key: whose value it is. dialect: the format of the model's dialect, which "auto" means; None: hermes.
    """
    name = (dialect or "hermes") if name == AUTO else name
    if name in TOOL_FORMATS:
        return TOOL_FORMATS[name]
    if ":" in name:
        return _of_right_type(load_object(name, key), f"{key}={name}")
    raise ConfigError(
        f"{key}={name}: unknown. Choose one of {AUTO}, {', '.join(TOOL_FORMATS)}, or name a function "
        "file.py:fn."
    )


def _of_right_type(parse: ToolParser, what: str) -> ToolParser:
    """The user's function, whose results are looked at: what it returns wrong is told with its name."""

    @functools.wraps(parse)
    def looked_at(text: str) -> Parsed:
        found = parse(text)
        if not isinstance(found, Parsed):
            wrong = f"{type(found).__name__}, not a Parsed"
        elif not isinstance(found.content, str):
            wrong = f"a Parsed whose content is {type(found.content).__name__}, not a text"
        elif not isinstance(found.calls, tuple | list):
            wrong = f"a Parsed whose calls are {type(found.calls).__name__}, not a tuple"
        elif not all(isinstance(call, ToolCall | MalformedCall) for call in found.calls):
            wrong = "a Parsed whose calls are not all ToolCall or MalformedCall"
        else:
            return found
        raise ConfigError(
            f"{what} returned {wrong}: the run reads an answer and calls from it. Return "
            "Parsed(content, calls) of siirl.dialect.tool_formats (docs/tools.md)."
        )

    return looked_at


def format_of(
    text: str, calls: Sequence[tuple[str, Mapping[str, Any]]], tools: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    """The format whose reader reads exactly these calls (name, arguments) in a turn that a template wrote.

    tools: their schemas, by which values without types are read. Of several formats that do, the first of
    TOOL_FORMATS; None: no format does, so the template writes none, or writes calls otherwise.
    """
    schemas = {tool["function"]["name"]: dict(tool) for tool in tools}
    return next((name for name, read in TOOL_FORMATS.items() if reads(read(text), calls, schemas)), None)


def reads(
    parsed: Parsed, calls: Sequence[tuple[str, Mapping[str, Any]]], schemas: Mapping[str, dict[str, Any]]
) -> bool:
    """Whether what was read is these calls, names and arguments."""
    if len(parsed.calls) != len(calls):
        return False
    for call, (name, arguments) in zip(parsed.calls, calls, strict=True):
        if isinstance(call, MalformedCall) or call.name != name:
            return False
        found = call.arguments
        if call.as_text and name in schemas:
            found = from_texts(found, schemas[name])
        if _spelled(found) != _spelled(arguments):
            return False
    return True


def _spelled(value: Any) -> str:
    """So that 1, 1.0 and true differ, and the order of names does not matter."""
    return json.dumps(value, sort_keys=True, default=str)
