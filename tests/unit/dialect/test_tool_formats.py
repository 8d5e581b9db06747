"""Formats of tool calls: what each reads, what is an error for the model, what stays text; none raises."""

import json
import time

import pytest
from some_cases import some

from siirl.dialect.tool_formats import (
    TOOL_FORMATS,
    MalformedCall,
    ToolCall,
    format_of,
    from_texts,
    tool_parser,
)

QUERY = 'say "hi"\n<b>ü</b> {"a": [1]}'
SPELLED = json.dumps({"q": QUERY, "n": 3}, ensure_ascii=False)
TYPED = {"q": QUERY, "n": 3}
TEXTS = {"q": QUERY, "n": "3"}
DSML, DS = "｜DSML｜", "｜tool▁"
K3 = f'<|open|>argument key="q" type="string"<|sep|>{QUERY}<|close|>argument<|sep|>'
M3 = "]<]minimax[>["

EXAMPLES = {
    "hermes": (f'<tool_call>\n{{"name": "f", "arguments": {SPELLED}}}\n</tool_call>', TYPED),
    "qwen3_coder": (
        f"<tool_call>\n<function=f>\n<parameter=q>\n{QUERY}\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        TEXTS,
    ),
    "seed_oss": (
        f"<seed:tool_call>\n<function=f>\n<parameter=q>{QUERY}</parameter>\n<parameter=n>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        TEXTS,
    ),
    "glm": (
        f"<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>{QUERY}</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        TEXTS,
    ),
    "hy3": (
        f"<tool_calls:x>\n<tool_call:x>f<tool_sep:x>\n<arg_key:x>q</arg_key:x>\n<arg_value:x>{QUERY}"
        "</arg_value:x>\n<arg_key:x>n</arg_key:x>\n<arg_value:x>3</arg_value:x>\n</tool_call:x>\n</tool_calls:x>",
        TEXTS,
    ),
    "mistral": (f"[TOOL_CALLS]f[ARGS]{SPELLED}", TYPED),
    "gpt_oss": (
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + SPELLED,
        TYPED,
    ),
    "muse": (
        '<|start|>assistant to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter '
        f'name="q">{QUERY}</atem:parameter>\n<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
        TEXTS,
    ),
    "functionary_v32": (f">>>f\n{SPELLED}", TYPED),
    "functionary_v31": (f"<function=f>{SPELLED}</function>", TYPED),
    "deepseek_v3": (
        f"<{DS}calls▁begin｜><{DS}call▁begin｜>function<{DS}sep｜>f\n```json\n{SPELLED}\n```<{DS}call▁end｜>"
        f"<{DS}calls▁end｜>",
        TYPED,
    ),
    "deepseek_dsml": (
        f'<{DSML}function_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="q" string="true">{QUERY}'
        f'</{DSML}parameter>\n<{DSML}parameter name="n" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>",
        TYPED,
    ),
    "minimax_m2": (
        f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="q">{QUERY}</parameter>\n<parameter name='
        '"n">3</parameter>\n</invoke>\n</minimax:tool_call>',
        TEXTS,
    ),
    "minimax_m3": (
        f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<q>{QUERY}{M3}</q>{M3}<n>3{M3}</n>{M3}</invoke>\n'
        f"{M3}</tool_call>",
        TEXTS,
    ),
    "minicpm": (
        f'<function name="f"><param name="q"><![CDATA[{QUERY}]]></param><param name="n">3</param></function>',
        TEXTS,
    ),
    "kimi_k2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{SPELLED}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        TYPED,
    ),
    "kimi_k3": (
        f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{K3}<|open|>argument key="n" type='
        '"number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        TYPED,
    ),
    "gemma4": (f'<|tool_call>call:f{{n:3,q:<|"|>{QUERY}<|"|>}}<tool_call|>', TYPED),
    "lfm2": (f"<|tool_call_start|>[f(q={QUERY!r}, n=3)]<|tool_call_end|>", TYPED),
    "command_a": (
        f'<|START_ACTION|>[\n {{"tool_call_id": "0", "tool_name": "f", "parameters": '
        f"{SPELLED}}}\n]<|END_ACTION|>",
        TYPED,
    ),
    "command_r": (f'Action:\n```json\n[\n{{"tool_name": "f", "parameters": {SPELLED}}}\n]```', TYPED),
    "tool_calls": (f'<tool_calls>[{{"name": "f", "arguments": {SPELLED}}}]</tool_calls>', TYPED),
    "nemotron": (f'<TOOLCALL>[{{"name": "f", "arguments": {SPELLED}}}]</TOOLCALL>', TYPED),
    "granite": (f'<|tool_call|>[{{"name": "f", "arguments": {SPELLED}}}]', TYPED),
    "functools": (f'functools[{{"name": "f", "arguments": {SPELLED}}}]', TYPED),
    "gigachat": (f'<|function_call|>{{"name": "f", "arguments": {SPELLED}}}', TYPED),
    "apertus": (f'<|tools_prefix|>[{{"f": {SPELLED}}}]<|tools_suffix|>', TYPED),
    "solar": (
        f"<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>f<|tool_call:args|>{SPELLED}<|tool_call:end|>",
        TYPED,
    ),
    "longcat": (f'<longcat_tool_call>{{"name": "f", "arguments": {SPELLED}}}</longcat_tool_call>', TYPED),
    "internlm": (
        f'<|action_start|><|plugin|>\n{{"name": "f", "parameters": {SPELLED}}}<|action_end|>',
        TYPED,
    ),
    "granite_fc": (f'<function_call> {{"name": "f", "arguments": {SPELLED}}}', TYPED),
    "olmo3": (f"<function_calls>\nf(q={QUERY!r}, n=3)\n</function_calls>", TYPED),
    "functiongemma": (
        f"<start_function_call>call:f{{n:3,q:<escape>{QUERY}<escape>}}<end_function_call>",
        TYPED,
    ),
    "step3": (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
        f'<steptml:parameter name="q">{QUERY}</steptml:parameter><steptml:parameter name="n">3'
        "</steptml:parameter></steptml:invoke>"
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        TEXTS,
    ),
    "json": (f'```json\n{{"name": "f", "arguments": {SPELLED}}}\n```', TYPED),
    "pythonic": (f"[f(q={QUERY!r}, n=3)]", TYPED),
    "llama3_json": (f'{{"name": "f", "parameters": {SPELLED}}}', TYPED),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
CUT_SHORT = {
    "functionary_v32": 9,
    "pythonic": 9,
    "llama3_json": 20,
    "json": 20,
    "minicpm": 30,
    "functionary_v31": 12,
}
"""Formats without a mark of their own before a call: so many characters show that one is meant."""


def test_every_format_has_an_example():
    assert set(EXAMPLES) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_format_reads_its_call_and_leaves_the_text_around_it(name):
    text, arguments = EXAMPLES[name]
    for before, after in (("", ""), ("Let me see.\n\n", ""), ("", "<|im_end|>\n")):
        if name == "functionary_v32" and before:
            before = f">>>all\n{before}"
        if name == "gpt_oss" and after:
            after = "<|call|>"
        parsed = tool_parser(name)(before + text + after)
        (call,) = parsed.calls
        assert isinstance(call, ToolCall) and (call.name, call.arguments) == ("f", arguments)
        assert call.as_text == (arguments is TEXTS)
        assert parsed.content.removesuffix("<|im_end|>") == before.removeprefix(">>>all\n").strip()
        if call.as_text:
            assert from_texts(call.arguments, TOOL) == TYPED


@pytest.mark.parametrize("name", EXAMPLES)
def test_of_a_call_the_format_is_found(name):
    text, _ = EXAMPLES[name]
    assert format_of(text, [("f", TYPED)], [TOOL]) == name
    assert format_of(text, [("f", TYPED | {"n": 3.0})], [TOOL]) != name
    assert format_of("The answer is 4.", [("f", TYPED)], [TOOL]) is None


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_call_that_is_cut_off_anywhere_is_an_error_and_no_call(name):
    text, _ = EXAMPLES[name]
    read = tool_parser(name)
    whole = next(length for length in range(len(text) + 1) if read(text[:length]).calls == read(text).calls)
    begun = CUT_SHORT.get(name) or next(n for n in range(1, whole) if read(text[:n]).calls)
    assert begun < 90
    for length in range(begun, whole):
        calls = read(text[:length]).calls
        *closed, last = calls  # a section that is not closed may hold a call that is
        assert isinstance(last, MalformedCall) and last.reason, text[:length]
        assert not closed or (read(text).calls == tuple(closed) and "is not closed" in last.reason)


NO_CALLS = [
    "The answer is 4.",
    'As JSON: {"answer": 4, "name": "Bob"}',
    '{"answer": [1, 2]}',
    '```json\n{"data": 1}\n```',
    "Write `<tool_call>` to open, and </tool_call> to close.",
    "The <tool_call> mark opens a call. Between <tool_call> and </tool_call> it stands.",
    "The marks `[TOOL_CALLS]`, '<|tool_call|>', \"<|START_ACTION|>\" and <|tool_call_start|>, too.",
    "Use functools, e.g. functools.reduce(f, [1])",
    "Action: go home. x < y, [1, 2], f(x) = {2}, a = [f(x) for x in y]",
    "<function> and <function=NAME> are tags; <|tool_call>, <|tools_prefix|>; <minimax:tool_call>.",
    "</tool_call> </think> <|python_end|>"[:22],
]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_stays_text(name, text):
    parsed = tool_parser(name)(text)
    assert parsed.calls == () and parsed.content == text


HERMES = '<tool_call>{{"name": "f", "arguments": {{"a": {}}}}}</tool_call>'
LFM = "<|tool_call_start|>{}<|tool_call_end|>"
DEEPSEEK = f"<{DS}call▁begin｜>{{}}<{DS}sep｜>{{{{}}}}<{DS}call▁end｜>"
NESTED = {"a": {"k": [1, None]}, "b": True}
MORE = [
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}]', [("f", {}, "abc")]),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}',
        [("f", {"x": 1}, "a1"), ("g", {}, None)],
    ),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", ["not a mapping"]),
    ("mistral", "[TOOL_CALLS]", ["follows [TOOL_CALLS]"]),
    ("deepseek_v3", f"<{DS}calls▁begin｜>{DEEPSEEK.format('f')}<{DS}calls▁end｜>", [("f", {}, None)]),
    (
        "deepseek_v3",
        f"<{DS}calls▁begin｜>{DEEPSEEK.format('f')}<{DS}call▁begin｜>g<{DS}sep｜>",
        [("f", {}, None), "is not closed"],
    ),
    ("kimi_k2", EXAMPLES["kimi_k2"][0], [("f", TYPED, "functions.f:0")]),
    ("command_a", EXAMPLES["command_a"][0], [("f", TYPED, "0")]),
    ("solar", EXAMPLES["solar"][0], [("f", TYPED, "x1")]),
    ("llama3_json", 'I look.\n{"type": "function", "name": "f", "parameters": {}} Done', [("f", {}, None)]),
    ("llama3_json", '<|python_tag|>f.call(a="x", n=1)', [("f", {"a": "x", "n": 1}, None)]),
    ("llama3_json", "<|python_tag|>print(1)", ["arguments are key=value"]),
    ("llama3_json", "<|python_tag|>import os", ["a call follows"]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", ', [("f", {}, None), "no JSON"]),
    ("llama3_json", 'Write {"name": NAME}. {"name": "f", "parameters": {}}', [("f", {}, None)]),
    ("pythonic", "[f(a=1), g()]", [("f", {"a": 1}, None), ("g", {}, None)]),
    ("pythonic", "[f(1)]", ["arguments are key=value"]),
    ("lfm2", LFM.format("[f(a={'k': [1, null]}, b=True), g()]"), [("f", NESTED, None), ("g", {}, None)]),
    ("lfm2", LFM.format("[f(a='it's', b=2)]"), [("f", {"a": "it's", "b": 2}, None)]),
    ("lfm2", LFM.format('[{"name": "f", "arguments": {}}]'), [("f", {}, None)]),
    ("gpt_oss", "<|channel|>analysis<|message|>I call f to=functions.f<|end|>", []),
    ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", [("f", {}, None)]),
    ("gpt_oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", ["no JSON"]),
    ("gpt_oss", "<|channel|>commentary to=functions.f", ["is not finished"]),
    ("functionary_v32", f"f\n{SPELLED}", [("f", TYPED, None)]),
    ("gemma4", "<|tool_call>call:f{a:{k:[1,None]},b:true}<tool_call|>", [("f", NESTED, None)]),
    ("gemma4", "<|tool_call>call:f{a:x}<tool_call|>", ["no value"]),
    ("hermes", HERMES.format('"</tool_call>"'), [("f", {"a": "</tool_call>"}, None)]),
    ("hermes", HERMES.format("NaN"), ["no number of JSON"]),
    ("hermes", HERMES.format("1e999"), ["no number of JSON"]),
    ("hermes", '<tool_call>{"name": " ", "arguments": {}}</tool_call>', ["has no name"]),
    ("gpt_oss", " to=functions.<|channel|>commentary<|message|>{}", ["has no name"]),
    ("pythonic", "[f(a=1e999)]", ["too large"]),
    ("hermes", HERMES.format('"\\ud800"'), [("f", {"a": "\ufffd"}, None)]),
    ("hermes", HERMES.format("9" * 5000), ["no JSON"]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>x</parameter> y</parameter></function></tool_call>",
        [("f", {"a": "x</parameter> y"}, None)],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=a>x</parameter></function></tool_call>",
        [("f", {"a": "x"}, None)],
    ),
    ("qwen3_coder", "<function=f><parameter=a>x</para", ["is not closed"]),
    ("deepseek_v3", DEEPSEEK.format("f") + DEEPSEEK.format("g"), [("f", {}, None), ("g", {}, None)]),
    ("granite", '<tool_call>[{"name": "f"}]', [("f", {}, None)]),
    ("glm", "<tool_call>f</tool_call>", [("f", {}, None)]),
    ("glm", "<tool_call>f(x)</tool_call>", ["name of a tool"]),
    (
        "tool_calls",
        '<tool_calls>\n{"name": "f"}\n{"name": "g"}\n</tool_calls>',
        [("f", {}, None), ("g", {}, None)],
    ),
    ("tool_calls", "<tool_calls>[]</tool_calls>", ["is empty"]),
    ("apertus", '<|tools_prefix|>[{"f": {}}]', [("f", {}, None)]),
    ("granite", '<|tool_call|>[{"name": "f", "parameters": {}}]<|/tool_call|>', [("f", {}, None)]),
    ("gigachat", 'function call<|role_sep|>\n{"name": "f"}<|message_sep|>', [("f", {}, None)]),
    ("command_r", 'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```', []),
    (
        "minimax_m3",
        f'{M3}<tool_call>{M3}<invoke name="f">{M3}<l>{M3}<item>1{M3}</item>{M3}</l>{M3}</invoke>'
        f"{M3}</tool_call>",
        [("f", {"l": ["1"]}, None)],
    ),
]


@pytest.mark.parametrize(("name", "text", "calls"), MORE)
def test_forms_of_a_format_and_errors_in_words(name, text, calls):
    found = tool_parser(name)(text).calls
    assert len(found) == len(calls), found
    for call, expected in zip(found, calls, strict=True):
        if isinstance(expected, str):
            assert isinstance(call, MalformedCall) and expected in call.reason
        else:
            assert isinstance(call, ToolCall) and (call.name, call.arguments, call.id) == expected


def test_what_gpt_oss_says_is_the_message_that_is_for_the_user():
    said = (
        "<|channel|>analysis<|message|>x is 5<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    )
    assert tool_parser("gpt_oss")(said).content == "4"
    assert tool_parser("gpt_oss")("4").content == "4"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("None", {"type": ["integer", "null"]}, None),
        ("['a', \"b'\"]", {"type": "array"}, ["a", "b'"]),
        ("{'k': {'j': [1, None]}}", {"type": "object"}, {"k": {"j": [1, None]}}),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3"),
        ("1", {"enum": [1, 2]}, 1),
        ("", {"type": "array"}, []),
        ("much", {"type": "number"}, "much"),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ({"a": ["1"]}, {"properties": {"a": {"items": {"type": "integer"}}}}, {"a": [1]}),
        ("3", {}, "3"),
    ],
)  # fmt: skip
def test_texts_are_read_by_the_schema(text, schema, value):
    whole = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}}
    assert from_texts({"x": text}, whole) == {"x": value}


GENERIC = [
    "[",
    "{",
    '{"a":',
    "(",
    "'",
    '"',
    "\\",
    " ",
    "\n",
    "9",
    "{a:",
    ">>>f\n",
    "\ud800",
    "f(a=",
    "-",
    "<",
    "`",
]
GENERIC += [
    '{"name":"f",',
    '{"name": [1,',
    '{"name":{',
    "```json",
    "Action:",
    "functools[",
    f"{M3}<a>",
    "[f(a='",
]
GENERIC += ["<tool_call>{", "`<tool_call>`", "<tool_call><function=f><parameter=a>", "<tool_call>f<arg_key>a"]


def hostile(name: str) -> list[str]:
    """Texts of about 100,000 characters that take quadratic time, or much stack, of a careless reader."""
    text = EXAMPLES[name][0]
    own = [text[:length] for length in range(6, len(text), max(len(text) // 8, 6))]
    own += [text[length:] for length in range(0, len(text), len(text) // 3)]
    turns = [piece * (100_000 // len(piece) + 1) for piece in GENERIC + own]
    return [(text[:40] if index % 2 else "") + turn for index, turn in enumerate(turns)]


@pytest.mark.parametrize("name", some(EXAMPLES, "hermes", "functionary_v32", "json", "qwen3_coder"))
def test_no_text_is_too_much_for_a_reader(name):
    read = tool_parser(name)
    for turn in hostile(name):
        begin = time.process_time()
        parsed = read(turn)
        assert time.process_time() - begin < 2.5, turn[:80]  # an idle core takes a tenth of it
        assert len(parsed.content) <= len(turn)
