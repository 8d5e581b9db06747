"""Calls that are JSON: an object with a name and arguments, or a name of its own before the arguments."""

import json
import re
from collections.abc import Callable
from typing import Any

from siirl.dialect.formats.call_marks import (
    Body,
    Call,
    Malformed,
    MalformedCall,
    Marks,
    Parsed,
    Turn,
    called,
    section,
    take_out,
)
from siirl.dialect.formats.literals import DECODER

JSON = re.compile(r"\s*[\[{]")


def json_at(turn: Turn, at: int, what: str = "the call") -> tuple[Any, int]:
    """The JSON value that begins at `at`, behind blanks, and the position behind it; else Malformed."""
    start = turn.skip(at)
    if not BEGINS.match(turn.text, start):  # json counts the lines of the whole text for an error
        raise Malformed(f"{what} is no JSON: no value is at {turn.text[start : start + 20]!r}", start)
    try:
        value, end = DECODER.raw_decode(turn.text, start)
    except json.JSONDecodeError as error:
        near = turn.text[error.pos : error.pos + 20]
        raise Malformed(f"{what} is no JSON: {error.msg} at {near!r}", error.pos) from None
    except RecursionError:
        raise Malformed(f"{what} is no JSON: it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, NaN
        raise Malformed(f"{what} is no JSON: {str(error)[:100]}") from None
    return (_printable(value), end) if SURROGATE.search(turn.text, start, end) else (value, end)


BEGINS = re.compile(r'\{\s*["}]|\[\s*(?:[\]\[{"\d-]|true|false|null)|["\d-]|true|false|null|NaN|Inf')
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _printable(value: Any) -> Any:
    """Halves of surrogate pairs, which JSON can spell and no text can hold, as question marks."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")


def call_of(value: Any, arguments_key: str = "arguments", name_key: str = "name") -> Call:
    """A call from {"name", "arguments" or "parameters"}, which may stand in "function"; arguments may be JSON
    in a text. The keys are those of the format, for the words of an error.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value["function"], **({"id": value["id"]} if "id" in value else {})}
    elif isinstance(value, dict) and isinstance(value.get("function"), str) and "name" not in value:
        value = {**value, "name": value["function"]}
    names = [value[key] for key in NAMES if key in value] if isinstance(value, dict) else []
    if not names or not isinstance(names[0], str) or not names[0]:
        return MalformedCall(f'a call is {{"{name_key}": "...", "{arguments_key}": {{...}}}}')
    arguments = next((value[key] for key in ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments, _ = whole_json(arguments, "what stands in the arguments")
        except Malformed as error:
            return MalformedCall(str(error))
    if not isinstance(arguments, dict):
        return MalformedCall(f'"{arguments_key}" is not a mapping of names to values')
    known = value.get("id", value.get("tool_call_id"))
    return called(names[0], arguments, known=known if isinstance(known, str) else None)


def whole_json(text: str, what: str) -> tuple[Any, int]:
    """The value of a text that is JSON as a whole; else Malformed."""
    turn = Turn(text)
    value, end = json_at(turn, 0, what)
    if turn.skip(end) < len(text):
        raise Malformed(f"{what} is no JSON: text follows it")
    return value, end


def one_object(arguments_key: str = "arguments") -> Body:
    """One object of JSON is the call."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        value, end = json_at(turn, at)
        return [call_of(value, arguments_key)], end

    return read


def objects(arguments_key: str = "arguments", name_key: str = "name") -> Body:
    """A list of objects, or objects one after another."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        value, end = json_at(turn, at)
        values = value if isinstance(value, list) else [value]
        while isinstance(value, dict) and JSON.match(turn.text, end):
            value, end = json_at(turn, end)
            values.append(value)
        calls = [call_of(value, arguments_key, name_key) for value in values]
        return calls or [MalformedCall("the list of calls is empty")], end

    return read


def arguments_at(turn: Turn, at: int, name: str) -> tuple[dict[str, Any], int]:
    """The mapping that stands at `at` as JSON; else Malformed."""
    value, end = json_at(turn, at, f"what stands as the arguments of {name[:60]!r}")
    if not isinstance(value, dict):
        raise Malformed(f"the arguments of {name[:60]!r} are not a mapping of names to values")
    return value, end


def between(begin: str, end: str, body: Body) -> Callable[[str], Parsed]:
    """The reader of JSON between two marks."""
    marks = Marks(begin, end, body)
    return lambda text: take_out(text, (marks,))


hermes = between("<tool_call>", "</tool_call>", one_object())
"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
longcat = between("<longcat_tool_call>", "</longcat_tool_call>", one_object())
"""The same with marks of its own."""
tool_calls = between("<tool_calls>", "</tool_calls>", objects())
"""<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>, or one object a line."""
nemotron = between("<TOOLCALL>", "</TOOLCALL>", objects())
"""The same in <TOOLCALL>."""
internlm = between("<|action_start|><|plugin|>", "<|action_end|>", one_object("parameters"))
"""<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>."""
granite_fc = between("<function_call>", "", one_object())
"""<function_call>{"name": ..., "arguments": {...}}."""


def granite(text: str) -> Parsed:
    """<|tool_call|> or <tool_call>, then [{"name": ..., "arguments": {...}}], then <|/tool_call|> or not."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        calls, end = objects()(turn, at)
        behind = turn.skip(end)
        return calls, behind + len("<|/tool_call|>") if turn.text.startswith(
            "<|/tool_call|>", behind
        ) else end

    return take_out(text, [Marks(begin, "", read) for begin in ("<|tool_call|>", "<tool_call>")])


def functools(text: str) -> Parsed:
    """functools[{"name": ..., "arguments": {...}}]."""
    marks = Marks("functools[", "", lambda turn, at: objects()(turn, at - 1), re.compile(r"\s*[{\]]"))
    return take_out(text, (marks,))


def command_a(text: str) -> Parsed:
    """<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>."""
    marks = Marks("<|START_ACTION|>", "<|END_ACTION|>", objects("parameters", "tool_name"))
    around = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    return take_out(text, (marks,), around)


def command_r(text: str) -> Parsed:
    """Action: and a fenced block of JSON with [{"tool_name": ..., "parameters": {...}}]."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        opening = FENCE.match(turn.text, at)
        if opening is None:
            raise Malformed("a block ```json follows Action:")
        calls, end = objects("parameters", "tool_name")(turn, opening.end())
        end = turn.expect("```", turn.skip(end), "the block ```json is not closed by ```")
        spoken = ("directly_answer", "directly-answer")
        return [call for call in calls if isinstance(call, MalformedCall) or call.name not in spoken], end

    return take_out(text, (Marks("Action:", "", read, FENCE),))


FENCE = re.compile(r"\s*```(?:json)?\s*(?=\[|\{)")


def apertus(text: str) -> Parsed:
    """<|tools_prefix|>[{"name": {...}}]<|tools_suffix|>; models end their turn by the last mark."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        value, end = json_at(turn, at)
        return [_named(one) for one in (value if isinstance(value, list) else [value])], end

    marks = Marks("<|tools_prefix|>", "<|tools_suffix|>", read, may_end_open=True)
    return take_out(text, (marks,), ("<|inner_prefix|>", "<|inner_suffix|>"))


def _named(value: Any) -> Call:
    if not isinstance(value, dict) or len(value) != 1 or not isinstance(next(iter(value.values())), dict):
        return MalformedCall('a call is {"NAME": {...}}, with its arguments by name')
    ((name, arguments),) = value.items()
    return called(name, arguments)


def gigachat(text: str) -> Parsed:
    """<|function_call|>{"name": ..., "arguments": {...}}, or a message of the role "function call"."""
    begins = ("<|function_call|>", "function call<|role_sep|>")
    return take_out(text, [Marks(begin, "", one_object()) for begin in begins], ("<|message_sep|>",))


NAME = re.compile(r"\s*([^\s\[\]{}<>()]+)\s*")
CALL_ID = re.compile(r"\[CALL_ID\]\s*([^\s\[\]{}]*)\s*")


def mistral(text: str) -> Parsed:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}], or [TOOL_CALLS]NAME[ARGS]{...} for each,
    with [CALL_ID]ID before [ARGS] or not.
    """

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        if JSON.match(turn.text, at):
            return objects()(turn, at)
        name = NAME.match(turn.text, at)
        if name is None:
            raise Malformed("a list of calls, or NAME[ARGS]{...}, follows [TOOL_CALLS]")
        end = name.end()
        known = CALL_ID.match(turn.text, end)
        end = known.end() if known else end
        end += len("[ARGS]") if turn.text.startswith("[ARGS]", end) else 0
        if not JSON.match(turn.text, end):
            raise Malformed("a list of calls, or NAME[ARGS]{...}, follows [TOOL_CALLS]")
        arguments, end = arguments_at(turn, end, name[1])
        return [called(name[1], arguments, known=known[1] or None if known else None)], end

    looks = re.compile(r"\s*([\[{]|[^\s\[\]{}<>()]+\s*(\[ARGS\]|\[CALL_ID\]|\{))")
    return take_out(text, (Marks("[TOOL_CALLS]", "", read, looks),))


def _deepseek_call(turn: Turn, at: int) -> tuple[list[Call], int]:
    """TYPE<sep>NAME and fenced JSON, of R1 and V3, or NAME<sep>JSON, of V3.1."""
    kind, at = turn.until("<｜tool▁sep｜>", at, "the name of the call")
    if JSON.match(turn.text, at):
        arguments, end = arguments_at(turn, at, kind)
        return [called(kind, arguments)], end
    name, at = turn.until("\n", at, "the name of the call")
    fence = FENCE.match(turn.text, at)
    if fence is None:
        raise Malformed("the arguments stand as JSON in a block ```json")
    arguments, end = arguments_at(turn, fence.end(), name)
    return [called(name, arguments)], turn.expect(
        "```", turn.skip(end), "the block ```json is not closed by ```"
    )


def deepseek_v3(text: str) -> Parsed:
    """Calls of DeepSeek R1, V3 and V3.1, between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>.

    Templates of R1's distills do not close the section of a single call.
    """
    item = Marks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_call)
    calls = section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", item, may_end_open=True)
    return take_out(text, (calls, item), ("<｜tool▁calls▁end｜>",))


def kimi_k2(text: str) -> Parsed:
    """<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|> in a section."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        known, at = turn.until("<|tool_call_argument_begin|>", at, "the id of the call")
        known = known.strip()
        name = known.removeprefix("functions.").rpartition(":")[0] or known.removeprefix("functions.")
        arguments, end = arguments_at(turn, at, name)
        return [called(name, arguments, known=known)], end

    item = Marks("<|tool_call_begin|>", "<|tool_call_end|>", read)
    return take_out(text, (section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", item), item))


def solar(text: str) -> Parsed:
    """<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|> in a section."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        known, at = turn.until("<|tool_call:name|>", at, "the id of the call")
        name, at = turn.until("<|tool_call:args|>", at, "the name of the call")
        arguments, end = arguments_at(turn, at, name)
        return [called(name, arguments, known=known.strip() or None)], end

    item = Marks("<|tool_call:begin|>", "<|tool_call:end|>", read)
    return take_out(text, (section("<|tool_calls|>", "", item),), ("<|content|>", "<|calls|>"))


def functionary_v31(text: str) -> Parsed:
    """<function=NAME>{...}</function>."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        name, at = turn.until(">", at, "<function=NAME")
        arguments, end = arguments_at(turn, at, name)
        return [called(name, arguments)], end

    looks = re.compile(r"[\w.:-]*(?:>\s*(?:\{|$)|$)")
    return take_out(text, (Marks("<function=", "</function>", read, looks, is_part=True),))


def json_blocks(text: str) -> Parsed:
    """Fenced blocks that are marked as json and hold {"name": ..., "arguments": {...}}."""
    marks = Marks("```json", "```", one_object(), BLOCK)
    return take_out(text, (_Block(marks.begin, marks.end, marks.body, marks.looks),))


BLOCK = re.compile(r'\s*\{\s*"(name|arguments|parameters|function|type)"\s*:')


class _Block(Marks):
    """A block of other JSON is text."""

    def is_talk(self, turn: Turn, start: int) -> bool:
        at = start + len(self.begin)
        if not self.looks.match(turn.text, at):
            return True
        try:
            return not is_call(json_at(turn, at)[0])
        except Malformed:
            return False


def is_call(value: Any) -> bool:
    """Whether a value that may be data has what only a call has."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name", value.get("function")), str):
        return False
    return any(key in value for key in ARGUMENTS) or set(value) <= {"name", "function", "type", "id"}
