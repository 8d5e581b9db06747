"""Calls that look like calls of Python, those of Gemma, and Llama's: JSON or Python in plain text."""

import re

from siirl.dialect.formats.call_marks import (
    Call,
    Malformed,
    MalformedCall,
    Marks,
    Parsed,
    ToolCall,
    Turn,
    called,
    take_out,
)
from siirl.dialect.formats.json_calls import (
    JSON,
    call_of,
    is_call,
    json_at,
    objects,
)
from siirl.dialect.formats.literals import literal_at, next_at

NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
KEYWORD = re.compile(r"([A-Za-z_][\w-]*)\s*=(?!=)")
CALLED = re.compile(r"\s*(?:\[\s*)?[A-Za-z_][\w.-]*\s*\(|\s*\[\s*\]|\s*[\[{]\s*[{\"]")
"""What a list of calls begins with."""


def call_at(turn: Turn, at: int) -> tuple[Call, int]:
    """The call NAME(key=value, ...) that begins at `at`, and the position behind it; else Malformed."""
    name = NAME.match(turn.text, at)
    if name is None:
        raise Malformed(f"there is no call NAME(key=value) at {turn.text[at : at + 20]!r}")
    arguments = {}
    at = turn.skip(name.end())
    while not turn.text.startswith(")", at):
        key = KEYWORD.match(turn.text, at)
        if key is None:
            raise Malformed(f"{name[1]}: arguments are key=value, not {turn.text[at : at + 20]!r}")
        arguments[key[1]], at = literal_at(turn, key.end())
        at = next_at(turn, at, ")")
    return called(name[1], arguments), at + 1


def calls_at(turn: Turn, at: int) -> tuple[list[Call], int]:
    """[f(a=1), g()], or calls one after another, or the same as JSON."""
    calls: list[Call] = []
    at = turn.skip(at)
    if JSON.match(turn.text, at) and not NAME.match(turn.text, at + 1):
        return objects()(turn, at)
    if not turn.text.startswith("[", at):
        while NAME.match(turn.text, at):
            call, at = call_at(turn, at)
            calls.append(call)
        if not calls:
            raise Malformed("calls are written [NAME(key=value)]")
        return calls, at
    at = turn.skip(at + 1)
    while not turn.text.startswith("]", at):
        call, at = call_at(turn, at)
        calls.append(call)
        at = next_at(turn, at, "]")
    return calls, at + 1


def lfm2(text: str) -> Parsed:
    """<|tool_call_start|>[NAME(key='value')]<|tool_call_end|>."""
    return take_out(text, (Marks("<|tool_call_start|>", "<|tool_call_end|>", calls_at, CALLED),))


def olmo3(text: str) -> Parsed:
    """<function_calls>, NAME(key='value') on each line, </function_calls>."""
    return take_out(text, (Marks("<function_calls>", "</function_calls>", calls_at, CALLED),))


def pythonic(text: str) -> Parsed:
    """[NAME(key='value')] on a line of its own; <|python_start|> and <|python_end|> around it are dropped."""
    for mark in PYTHON_MARKS:
        text = text.replace(mark, "")
    turn = Turn(text)
    content: list[str] = []
    calls: list[Call] = []
    at = 0
    while match := LIST.search(text, at):
        content.append(text[at : match.start()])
        try:
            found, at = calls_at(turn, match.start())
        except Malformed as error:
            found, at = [MalformedCall(str(error))], len(text)
        calls += found
    content.append(text[at:])
    return Parsed("".join(content).strip() if calls else text, tuple(calls))


PYTHON_MARKS = ("<|python_start|>", "<|python_end|>")
LIST = re.compile(r"^[ \t]*\[\s*[A-Za-z_][\w.-]*\(", re.MULTILINE)


def _gemma_call(turn: Turn, at: int) -> tuple[list[Call], int]:
    name, end = turn.until("{", turn.expect("call:", turn.skip(at), "call:NAME{...} follows"), "call:NAME")
    arguments, end = literal_at(turn, end - 1)
    return [called(name, arguments)], end


def gemma4(text: str) -> Parsed:
    """<|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>."""
    marks = Marks("<|tool_call>", "<tool_call|>", _gemma_call, re.compile(r"\s*call:"), may_end_open=True)
    return take_out(text, (marks,), ("<|tool_response>",))


def functiongemma(text: str) -> Parsed:
    """<start_function_call>call:NAME{key:<escape>value<escape>}<end_function_call>."""
    marks = Marks("<start_function_call>", "<end_function_call>", _gemma_call, re.compile(r"\s*call:"), True)
    return take_out(text, (marks,), ("<start_function_response>",))


OBJECT = re.compile(r'<\|python_tag\|>|\{\s*"(?:name|type|function|parameters|arguments|id)"\s*:')
ATTEMPT = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')
TAG_CALL = re.compile(r"\s*[A-Za-z_][\w.-]*\s*\(")
BETWEEN = re.compile(r"\s*;\s*(?=[{<])|\s*(?=\{)")


def llama3_json(text: str) -> Parsed:
    """{"name": ..., "parameters": {...}}, alone, several with ; between, or behind text; or
    NAME.call(key="value") behind <|python_tag|>.
    """
    turn = Turn(text)
    content: list[str] = []
    calls: list[Call] = []
    at = searched = 0
    while match := OBJECT.search(text, searched):
        try:
            if match[0] == "<|python_tag|>":
                call, end = _tagged(turn, match.end())
            else:
                value, end = json_at(turn, match.start())
                call = call_of(value, "parameters") if is_call(value) else None
        except Malformed as error:
            alone = turn.skip(at) == match.start() and (at == 0 or bool(calls))
            meant = alone or match[0] == "<|python_tag|>" or ATTEMPT.match(text, match.start())
            if not meant and error.at < 0:
                break
            call, end = (MalformedCall(str(error)), len(text)) if meant else (None, error.at)
        searched = max(end, match.end())
        if call is None:
            continue
        content.append(text[at : match.start()])
        calls.append(call)
        behind = BETWEEN.match(text, end)
        at = searched = behind.end() if behind else end
    content.append(text[at:])
    rest = "".join(content)
    if not calls and not any(mark in text for mark in PYTHON_MARKS):
        return Parsed(text)
    for mark in PYTHON_MARKS:
        rest = rest.replace(mark, "")
    return Parsed(rest.strip(), tuple(calls))


def _tagged(turn: Turn, at: int) -> tuple[Call, int]:
    """What stands behind <|python_tag|>."""
    if JSON.match(turn.text, at):
        value, end = json_at(turn, at)
        return call_of(value, "parameters"), end
    if not TAG_CALL.match(turn.text, at):
        raise Malformed('a call follows <|python_tag|>: JSON, or NAME.call(key="value")')
    call, end = call_at(turn, at)
    if isinstance(call, ToolCall):
        call = called(call.name.removesuffix(".call"), call.arguments)
    return call, end
