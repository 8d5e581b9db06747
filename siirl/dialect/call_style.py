"""How a chat template takes and writes calls of tools, found by giving it some. No torch."""

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl.dialect.template import ChatTemplate
from siirl.dialect.tool_formats import TOOL_FORMATS, format_of

ASKED = "Which one is it?"
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {
        "q": 'say "it\'s"\n {"a": [1]} <b>ü</b> C:\\n',
        "n": 3,
        "x": 1.5,
        "b": True,
        "l": ["a", 'b"'],
        "o": {"k": {"j": [1, None]}},
    },
    {"q": "two words", "n": 3},
)
"""Of every kind; and those that every template can write that writes calls at all."""
TYPES = {"q": "string", "n": "integer", "x": "number", "b": "boolean"}
NAMES = ("look_up", "find")
TEXT = "Well."
IDS = ("call{index:05d}", "functions.{name}:{index}")


def _tool(name: str) -> dict[str, Any]:
    properties: dict[str, Any] = {key: {"type": kind, "description": "."} for key, kind in TYPES.items()}
    text = {"type": "string", "description": "."}
    properties["l"] = {"type": "array", "items": text, "description": "."}
    properties["o"] = {"type": "object", "additionalProperties": text, "description": "."}
    parameters = {"type": "object", "properties": properties, "required": ["q"]}
    return {"type": "function", "function": {"name": name, "description": ".", "parameters": parameters}}


TOOLS = tuple(map(_tool, NAMES))


@dataclass(frozen=True)
class CallStyle:
    """What a template does with calls."""

    format: str
    """The name of the format that it writes (siirl/dialect/tool_formats.py)."""
    several: bool
    """A turn may hold several calls."""
    spelled: bool
    """It takes arguments as JSON in a text only, no mapping."""
    keeps_text: bool
    """It writes text of a turn with calls, too, and not as reasoning."""
    ids: str
    """A pattern of the ids that calls need: nine letters and digits, or the name and number of the call."""
    exact: bool
    """What it writes reads back as it was, whatever the arguments are; else some texts do not."""

    def message(self, calls: Sequence[tuple[str, Mapping[str, Any]]], text: str = "") -> dict[str, Any]:
        """A turn with calls (name, arguments) as the template takes it."""
        return assistant_turn(calls, text if self.keeps_text else "", self.spelled, self.ids)


def assistant_turn(
    calls: Sequence[tuple[str, Mapping[str, Any]]], text: str, spelled: bool, ids: str
) -> dict[str, Any]:
    """A turn with calls as a message. spelled: their arguments are JSON in a text."""
    made = [
        {
            "type": "function",
            "id": ids.format(name=name, index=index),
            "function": {
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False) if spelled else dict(arguments),
            },
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def turn_of(template: ChatTemplate, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """What a template writes behind a question for a turn; "" if it refuses. Some take no tools."""
    asked = {"role": "user", "content": ASKED}
    for shown in (tools, ()):
        text = template.attempt([asked, message], list(shown))
        if text:
            return text.rpartition(ASKED)[2]
    return ""


FORMS = ((False, TEXT), (False, ""), (True, TEXT), (True, ""))
"""(arguments spelled, text) of turns that are tried."""


def call_style(template: ChatTemplate) -> CallStyle | None:
    """How the template writes calls; None if it writes none that a format reads.

    The first form that is read says the style: arguments of all kinds before plain ones, two calls before
    one.
    """
    plain, word = [(NAMES[0], ARGUMENTS[-1])], ARGUMENTS[-1]["q"]
    tried = (assistant_turn(plain, text, spelled, ids) for ids in IDS for spelled, text in FORMS)
    if not any(word in turn_of(template, message, TOOLS) for message in tried):
        return None
    for arguments, count, ids, (spelled, text) in itertools.product(ARGUMENTS, (2, 1), IDS, FORMS):
        calls = [(name, arguments) for name in NAMES[:count]]
        written = turn_of(template, assistant_turn(calls, text, spelled, ids), TOOLS)
        name = format_of(written, calls, TOOLS) if NAMES[0] in written else None
        if name is not None:
            keeps = TEXT in TOOL_FORMATS[name](written).content
            return CallStyle(name, count > 1, spelled, keeps, ids, arguments is ARGUMENTS[0])
    return None


TOLD = (
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|START_ACTION|>", "command_a"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|tools_prefix|>", "apertus"),
    ("<|tool_call|>", "granite"),
    ("<start_function_call>", "functiongemma"),
    ("<longcat_tool_call>", "longcat"),
    ("<|action_start|>", "internlm"),
    ("<｜tool_calls_begin｜>", "step3"),
    ("functools[", "functools"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<TOOLCALL>", "nemotron"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
)
"""Marks of formats, for models whose template writes no calls."""


def told_format(template: ChatTemplate, tokens: Collection[str]) -> str | None:
    """The format of which the prompt tells a model that has tools, else that of a mark in the template, else
    that of a mark among the tokens, else None. For templates that write no calls.

    tokens: those that were added to the vocabulary.
    """
    prompt = template.attempt([{"role": "user", "content": ASKED}], list(TOOLS), generation=True)
    for where in (prompt, str(template.tokenizer.chat_template), tokens):
        for mark, name in TOLD:
            if mark in where:
                return name
    return None
