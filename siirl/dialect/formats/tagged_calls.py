"""Calls whose arguments stand between tags of their own, most of them as texts without types."""

import re
from collections.abc import Callable
from typing import Any

from siirl.dialect.formats.call_marks import (
    Body,
    Call,
    Malformed,
    Marks,
    Parsed,
    Turn,
    called,
    section,
    several,
    take_out,
)
from siirl.dialect.formats.json_calls import whole_json

DEEPEST = 100
"""Elements nested more deeply are not read."""


def _value_until(turn: Turn, close: str, ends: re.Pattern[str], at: int, name: str) -> tuple[str, int]:
    """A value that begins at `at` and ends at the first `close` that another parameter or the end of the call
    follows, so that a value may hold the tag; and the position behind it.
    """
    end = turn.find(ends, at)
    if end < 0:
        raise Malformed(f"the parameter {name[:60]!r} is not closed by {close}")
    return turn.text[at:end], end + len(close)


Read = Callable[[re.Match[str], str], Any]
"""(match of the tag, text) -> value."""
Parameters = Callable[[Turn, int, str], tuple[dict[str, Any], int]]


def parameters(open_tag: re.Pattern[str], close: str, end: str, value: Read) -> Parameters:
    """Reads parameters up to `end`, which closes the call: (turn, at, words) -> arguments, behind `end`.

    open_tag: one, its group 1 the name. value: of the text between the tags.
    """
    ends = re.compile(rf"{re.escape(close)}(?=\s*(?:{open_tag.pattern}|{re.escape(end)}))")

    def read(turn: Turn, at: int, what: str) -> tuple[dict[str, Any], int]:
        arguments: dict[str, Any] = {}
        while True:
            at = turn.skip(at)
            if turn.text.startswith(end, at):
                return arguments, at + len(end)
            opening = open_tag.match(turn.text, at)
            if opening is None:
                raise Malformed(f"{what} holds text outside of its parameters, or is not closed by {end}")
            text, at = _value_until(turn, close, ends, opening.end(), opening[1])
            arguments[opening[1]] = value(opening, text)

    return read


def _on_lines(_: re.Match[str], text: str) -> str:
    """A value that stands on lines of its own."""
    return text.removeprefix("\n").removesuffix("\n")


def _as_it_is(_: re.Match[str], text: str) -> str:
    return text


FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>")


def _functions(value: Read) -> Body:
    """<function=NAME><parameter=KEY>value</parameter></function>."""
    read_parameters = parameters(re.compile(r"<parameter=([^>\n]+)>"), "</parameter>", "</function>", value)

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        function = FUNCTION.match(turn.text, at)
        if function is None:
            raise Malformed("the call holds no <function=NAME> ... </function>")
        arguments, end = read_parameters(turn, function.end(), f"<function={function[1][:60]}>")
        return [called(function[1], arguments, as_text=True)], end

    return read


LOOKS = re.compile(r"\s*<function")


def qwen3_coder(text: str) -> Parsed:
    """<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>.

    Models leave out <tool_call> at times.
    """
    body = _functions(_on_lines)
    looks = re.compile(r"[^>\s]+>\s*(?:<parameter=|</function>)")
    bare = Marks("<function=", "", lambda turn, at: body(turn, at - len("<function=")), looks, is_part=True)
    parsed = take_out(text, (Marks("<tool_call>", "</tool_call>", body, LOOKS), bare))
    if not parsed.calls:
        return parsed
    return Parsed(parsed.content.removesuffix("</tool_call>").rstrip(), parsed.calls)


def seed_oss(text: str) -> Parsed:
    """<seed:tool_call><function=NAME><parameter=KEY>value</parameter></function></seed:tool_call>."""
    return take_out(text, (Marks("<seed:tool_call>", "</seed:tool_call>", _functions(_as_it_is), LOOKS),))


def _keys(suffix: str, head: str) -> Body:
    """NAME, then <arg_key>KEY</arg_key><arg_value>value</arg_value> for each argument. head: what ends it."""
    key_open, key_close = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
    opening, value = re.escape(key_open), rf"{re.escape(key_close)}\s*<arg_value{re.escape(suffix)}>"
    open_tag = re.compile(rf"{opening}((?:(?!</?arg_).)*?){value}", re.DOTALL)
    end = f"</tool_call{suffix}>"
    read_parameters = parameters(open_tag, f"</arg_value{suffix}>", end, _as_it_is)
    name = re.compile(rf"\s*([^\s<>{{}}()]+)\s*{re.escape(head)}(?=\s*(?:<|$))")

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        named = name.match(turn.text, at)
        if named is None:
            raise Malformed(f"the call does not begin with the name of a tool, and {key_open} behind it")
        arguments, end_at = read_parameters(turn, named.end(), f"the call of {named[1][:60]}")
        return [called(named[1], arguments, as_text=True)], end_at - len(end)

    return read


def glm(text: str) -> Parsed:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>."""
    looks = re.compile(r"\s*[\w.:-]+\s*(<arg_key>|</tool_call>)")
    return take_out(text, (Marks("<tool_call>", "</tool_call>", _keys("", ""), looks),))


def hy3(text: str) -> Parsed:
    """As glm, with <tool_sep> behind the name, in <tool_calls>, and a suffix of all marks: <tool_call:x>."""
    found = SUFFIX.search(text)
    suffix = (found[1] or "") if found else ""
    item = Marks(f"<tool_call{suffix}>", f"</tool_call{suffix}>", _keys(suffix, f"<tool_sep{suffix}>"))
    return take_out(text, (section(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>", item),))


SUFFIX = re.compile(r"<tool_calls(:\w+)?>")


def _invoked(prefix: str, value: Read, as_text: bool) -> Marks:
    """<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>, each tag with a prefix."""
    open_tag = re.compile(rf'<{prefix}parameter name="([^"]*)"([^>]*)>')
    read_parameters = parameters(open_tag, f"</{prefix}parameter>", f"</{prefix}invoke>", value)

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        name, at = turn.until('">', at, f'<{prefix}invoke name="NAME">')
        arguments, end = read_parameters(turn, at, f"the call of {name[:60]}")
        return [called(name, arguments, as_text)], end - len(f"</{prefix}invoke>")

    return Marks(f'<{prefix}invoke name="', f"</{prefix}invoke>", read)


def minimax_m2(text: str) -> Parsed:
    """<minimax:tool_call>, and in it <invoke name="NAME"><parameter name="KEY">value</parameter></invoke>."""
    item = _invoked("", _as_it_is, True)
    return take_out(text, (section("<minimax:tool_call>", "</minimax:tool_call>", item),))


def atem_block() -> Marks:
    """<atem:function_calls> with <atem:invoke name="NAME">, of Muse."""
    return section("<atem:function_calls>", "</atem:function_calls>", _invoked("atem:", _as_it_is, True))


def _typed(opening: re.Match[str], text: str) -> Any:
    """A value whose tag says whether it is a text, or JSON."""
    if 'string="false"' not in opening[2]:
        return text
    return whole_json(text, f"the parameter {opening[1][:60]!r}")[0]


def deepseek_dsml(text: str) -> Parsed:
    """As minimax_m2, with ｜DSML｜ before the name of each tag, in an element function_calls or tool_calls;
    each parameter has string="true" or "false": it is a text, or JSON.
    """
    item, kinds = _invoked("｜DSML｜", _typed, False), ("function_calls", "tool_calls")
    return take_out(text, [section(f"<｜DSML｜{kind}>", f"</｜DSML｜{kind}>", item) for kind in kinds])


def step3(text: str) -> Parsed:
    """As minimax_m2 with steptml: before the name of each tag, in a call of a section."""
    invoke = several(_invoked("steptml:", _as_it_is, True))

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        return invoke(turn, turn.until("<｜tool_sep｜>", at, "the kind of the call")[1])

    item = Marks("<｜tool_call_begin｜>", "<｜tool_call_end｜>", read)
    return take_out(text, (section("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", item),))


def minicpm(text: str) -> Parsed:
    """<function name="NAME"><param name="KEY">value</param></function>, values in CDATA or not."""
    read_parameters = parameters(re.compile(r'<param name="([^"]*)">'), "</param>", "</function>", _of_cdata)

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        name, at = turn.until('">', at, '<function name="NAME">')
        arguments, end = read_parameters(turn, at, f"the call of {name[:60]}")
        return [called(name, arguments, as_text=True)], end - len("</function>")

    looks = re.compile(r'[^"<>]*(?:">\s*(?:<|$)|"?$)')
    return take_out(text, (Marks('<function name="', "</function>", read, looks, is_part=True),))


def _of_cdata(_: re.Match[str], text: str) -> str:
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        return text[len("<![CDATA[") : -len("]]>")]
    return text


MINIMAX = "]<]minimax[>["
ELEMENT = re.compile(re.escape(MINIMAX) + r"<([^/<>\n][^<>\n]*)>")


def _element_at(turn: Turn, at: int, name: str, depth: int) -> tuple[Any, int]:
    """The value of the element `name`, whose begin tag ends at `at`: a text, list of items, or mapping."""
    if depth > DEEPEST:
        raise Malformed("the elements are nested too deeply")
    close = f"{MINIMAX}</{name}>"
    if not ELEMENT.match(turn.text, turn.skip(at)):
        return turn.until(close, at, f"the element {name[:60]!r}")
    found: list[tuple[str, Any]] = []
    at = turn.skip(at)
    while child := ELEMENT.match(turn.text, at):
        value, at = _element_at(turn, child.end(), child[1], depth + 1)
        found.append((child[1], value))
        at = turn.skip(at)
    at = turn.expect(close, at, f"the element {name[:60]!r} is not closed by {close}")
    if all(key == "item" for key, _ in found):
        return [value for _, value in found], at
    return dict(found), at


def minimax_m3(text: str) -> Parsed:
    """As minimax_m2, with a mark before each tag, the arguments as elements, and nested ones within them."""

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        name, at = turn.until('">', at, '<invoke name="NAME">')
        arguments: dict[str, Any] = {}
        at = turn.skip(at)
        while child := ELEMENT.match(turn.text, at):
            arguments[child[1]], at = _element_at(turn, child.end(), child[1], 0)
            at = turn.skip(at)
        return [called(name, arguments, as_text=True)], at

    item = Marks(f'{MINIMAX}<invoke name="', f"{MINIMAX}</invoke>", read)
    return take_out(text, (section(f"{MINIMAX}<tool_call>", f"{MINIMAX}</tool_call>", item),))


K3_AROUND = (
    "<|end_of_msg|>",
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
    "<|end_of_msg|>",
)
ATTRIBUTES = re.compile(r'(\w+)="([^"]*)"')
K3_ARGUMENT = re.compile(r"<\|open\|>(?:argument|json) ((?:(?!<\|).)*)<\|sep\|>", re.DOTALL)


def _attributes(text: str) -> dict[str, str]:
    return {
        key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in ATTRIBUTES.findall(text)
    }


def kimi_k3(text: str) -> Parsed:
    """Elements call tool="NAME" with elements argument key="KEY" type="string", in an element tools; tags are
    <|open|>NAME ...<|sep|> and <|close|>NAME<|sep|>.
    """

    def read(turn: Turn, at: int) -> tuple[list[Call], int]:
        head, at = turn.until("<|sep|>", at, "the head of the call")
        name = _attributes(head).get("tool")
        if not name:
            raise Malformed('the call has no tool="NAME"')
        arguments: dict[str, Any] = {}
        at = turn.skip(at)
        while opening := K3_ARGUMENT.match(turn.text, at):
            kind = "json" if turn.text.startswith("<|open|>json", at) else "argument"
            value, at = turn.until(f"<|close|>{kind}<|sep|>", opening.end(), f"an element {kind}")
            _add(arguments, kind, _attributes(opening[1]), value)
            at = turn.skip(at)
        return [called(name, arguments)], at

    item = Marks("<|open|>call", "<|close|>call<|sep|>", read)
    tools = section("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", item)
    return take_out(text, (tools,), K3_AROUND)


def _add(arguments: dict[str, Any], kind: str, attributes: dict[str, str], text: str) -> None:
    if kind == "json":
        values = whole_json(text, "what stands in the arguments")[0]
        if not isinstance(values, dict):
            raise Malformed("the arguments are not a mapping of names to values")
        arguments.update(values)
        return
    if "key" not in attributes:
        raise Malformed('an argument has no key="KEY"')
    is_text = attributes.get("type", "string") == "string"
    key = attributes["key"]
    arguments[key] = text if is_text else whole_json(text, f"the argument {key[:60]!r}")[0]
