"""Tools: formats of calls, arguments against schemas, built-ins, and that errors are texts for the model."""

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml

from siirl.agents.builtin_tools import CalculationError, Calculator, PythonTool, calculate, number_text
from siirl.agents.tool_files import FunctionTool, check_tool_file, load_tools
from siirl.agents.tool_schema import argument_errors, check_schema, function_schema
from siirl.agents.tools import Toolbox, ToolLimits, run_tools, truncated
from siirl.config.rollout import MultiTurnConfig
from siirl.dialect.tool_formats import (
    TOOL_FORMATS,
    MalformedCall,
    Parsed,
    ToolCall,
    from_texts,
    register_tool_parser,
    tool_parser,
)
from siirl.errors import ConfigError, DagError
from siirl.sandbox.box import Box, strongest_isolation

pytestmark = pytest.mark.heavy

FILE = Path(__file__).with_name("tool_functions.py")
HERE = "<tool_call>"


def call_text(name, arguments):
    return f"{HERE}\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    "parser, text, content, calls",
    [
        ("hermes", "no call {}", "no call {}", []),
        ("hermes", "Let me see. " + call_text("f", {"a": 1}), "Let me see.", [("f", {"a": 1})]),
        (
            "hermes",
            call_text("f", {}) + "\n" + call_text("g", {"x": [1]}),
            "",
            [("f", {}), ("g", {"x": [1]})],
        ),
        (
            "hermes",
            f'{HERE}{{"name": "f", "arguments": "{{\\"a\\": 2}}"}}</tool_call>',
            "",
            [("f", {"a": 2})],
        ),
        ("hermes", f"a {HERE}{{nonsense</tool_call> b", "a  b", ["the call is no JSON"]),
        ("hermes", f'a {HERE}{{"name": "f"}}', "a", ["is not closed"]),
        ("hermes", f"{HERE}[1]</tool_call>", "", ["a call is"]),
        ("hermes", f'{HERE}{{"name": 3}}</tool_call>', "", ["a call is"]),
        ("hermes", f'{HERE}{{"name": "f", "arguments": [1]}}</tool_call>', "", ["not a mapping"]),
        ("hermes", HERE + "[" * 100_000 + "</tool_call>", "", ["the call is no JSON"]),
        ("llama3_json", "The answer is 4.", "The answer is 4.", []),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        (
            "llama3_json",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}',
            "",
            [("f", {}), ("g", {})],
        ),
        ("llama3_json", '{"name": "f", ', "", ["the call is no JSON"]),
        ("json", 'See\n```json\n{"name": "f", "arguments": {"a": 1}}\n```', "See", [("f", {"a": 1})]),
        ("json", '```json\n{"data": 1}\n```', '```json\n{"data": 1}\n```', []),
        (
            "json",
            '```json\n{"data": 1}\n``` and ```json\n{"name": "f"}\n```',
            '```json\n{"data": 1}\n``` and',
            [("f", {})],
        ),
        (
            "qwen3_coder",
            f"ok {HERE}\n<function=run>\n<parameter=code>\nx = 1\n  y\n</parameter>\n"
            "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
            "ok",
            [("run", {"code": "x = 1\n  y", "n": "3"})],
        ),
        ("qwen3_coder", f"{HERE}<function=f>oops</function></tool_call>", "", ["outside of its parameters"]),
        ("qwen3_coder", f"{HERE}f()</tool_call>", "", ["holds no <function"]),
    ],
)
def test_parsers_take_calls_out_of_a_turn(parser, text, content, calls):
    parsed = tool_parser(parser)(text)
    assert parsed.content == content
    assert len(parsed.calls) == len(calls)
    for call, expected in zip(parsed.calls, calls, strict=True):
        if isinstance(expected, str):
            assert isinstance(call, MalformedCall) and expected in call.reason
        else:
            assert isinstance(call, ToolCall) and (call.name, call.arguments) == expected


def test_the_names_of_parsers_are_those_of_the_configuration():
    rule = MultiTurnConfig.__dataclass_fields__["format"].metadata["rule"]
    assert set(rule.choices) == {"auto", *TOOL_FORMATS}
    assert tool_parser(f"{FILE}:bad").__name__ == "bad"
    with pytest.raises(ConfigError, match="Choose one of auto, hermes"):
        tool_parser("hermse")


def test_a_parser_does_not_take_the_name_of_another():
    hermes = tool_parser("hermes")
    with pytest.raises(ConfigError, match="'hermes' is registered twice"):
        register_tool_parser("hermes")(lambda text: Parsed(text))
    assert tool_parser("hermes") is hermes
    register_tool_parser("hermes")(hermes)


SCHEMA = function_schema(
    "search",
    "",
    {
        "query": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 9},
        "weight": {"type": ["number", "null"]},
        "kind": {"enum": ["page", "image"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"site": {"type": "string"}}, "required": ["site"]},
        "exact": {"type": "boolean"},
    },
    ["query"],
)


@pytest.mark.parametrize(
    "arguments, errors",
    [
        ({"query": "x"}, []),
        ({"query": "x", "limit": 3, "weight": None, "kind": "page", "tags": ["a"], "exact": True}, []),
        ({"query": "x", "limit": 3.0, "weight": 2, "where": {"site": "s", "more": 1}}, []),
        ({}, ["query is missing"]),
        ({"query": 3}, ["query must be string, not 3"]),
        ({"query": "x", "limit": "3"}, ['limit must be integer, not "3"']),
        ({"query": "x", "limit": True}, ["limit must be integer, not true"]),
        ({"query": "x", "exact": 1}, ["exact must be boolean, not 1"]),
        ({"query": "x", "limit": 0}, ["limit must be at least 1, not 0"]),
        ({"query": "x", "limit": 12}, ["limit must be at most 9, not 12"]),
        ({"query": "x", "weight": "w"}, ['weight must be number or null, not "w"']),
        ({"query": "x", "kind": "video"}, ['kind must be one of "page", "image", not "video"']),
        ({"query": "x", "tags": ["a", 2]}, ["tags[1] must be string, not 2"]),
        ({"query": "x", "where": {}}, ["where.site is missing"]),
        ({"q": "x"}, ["query is missing", "q is no argument of it"]),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments, errors):
    found = argument_errors(arguments, SCHEMA)
    assert len(found) == len(errors)
    assert all(part in whole for part, whole in zip(errors, found, strict=True))


def test_texts_become_what_the_schema_wants():
    texts = {"query": "3", "limit": "3", "tags": '["a"]', "exact": "True", "weight": "much"}
    values = from_texts(texts, SCHEMA)
    assert values == {"query": "3", "limit": 3, "tags": ["a"], "exact": True, "weight": "much"}


@pytest.mark.parametrize(
    "schema, words",
    [
        ({}, "is no function"),
        ({"function": {"name": ""}}, "is no function"),
        ({"function": {"name": "f", "parameters": {"type": "array"}}}, "are no object"),
        (
            {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "str"}}}}},
            "unknown type 'str'",
        ),
        ({"function": {"name": "f", "parameters": {"properties": {"a": "string"}}}}, "the schema of 'a'"),
        ({"function": {"name": "f", "parameters": {"required": ["a"]}}}, "are no properties"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema, words):
    with pytest.raises(ConfigError, match=words):
        check_schema(schema, "tool 1")


@pytest.mark.parametrize(
    "expression, value",
    [
        ("2 + 3 * 4", "14"), ("(2+3)*4", "20"), ("7/2", "3.5"), ("-2**2", "-4"), ("2^10", "1024"),
        ("7 // 2 + 7 % 4", "6"), ("sqrt(16)", "4"), ("max(1, 2.5)", "2.5"), ("round(pi, 2)", "3.14"),
        ("0.1 + 0.2", "0.3"), ("10**20", "100000000000000000000"), ("1e300 * 1e-300", "1"),
    ],
)  # fmt: skip
def test_the_calculator_calculates(expression, value):
    assert number_text(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "1/0", "9**9**9**9", "2**(2**40)", "(10**1200) * (10**1200)", "1e308*10",
        "(-8)**0.5", "log(-1)",
        "__import__('os').system('id')", "open('x')", "().__class__", "'a'*10", "[1]", "x", "True",
        "1 if 1 else 2",
        "lambda: 1", "min(1)", "sqrt(1, 2)", "sqrt(x=1)", "10**400 + 0.5", "(" * 900, "1" * 2000,
        "9" * 990 + "**3",
        "1\0", "1;2", "a:=1", "factorial(99)", "1e999",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_told_so_and_never_run(expression):
    start = time.thread_time()
    with pytest.raises(CalculationError):
        calculate(expression)
    assert time.thread_time() - start < 1
    assert Calculator()({"expression": expression}, None).startswith("Error: ")


def schema_of(**properties):
    return {"function": {"name": "t", "parameters": {"type": "object", "properties": properties}}}


def toolbox(tmp_path, *entries):
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": list(entries)}))
    return load_tools(MultiTurnConfig(tool_config_path=str(file)), "node 'n'")


def user_tool(name, properties, **config):
    schema = function_schema(name, "", properties, list(properties))
    return {"function": f"{FILE}:{name}", "tool_schema": schema, "config": config}


NUMBER = {"type": "number"}
ADD = user_tool("add", {"a": NUMBER, "b": NUMBER}, offset=100)
SLOW = user_tool("slow", {"seconds": NUMBER})
BAD = user_tool("bad", {"how": {"type": "string"}})


def run(box, calls, episode=None, **limits):
    return asyncio.run(run_tools(calls, box, {} if episode is None else episode, ToolLimits(**limits)))


def test_calls_are_answered_in_order_and_errors_in_words(tmp_path):
    box = toolbox(tmp_path, {"builtin": "calculator"}, ADD, BAD)
    assert [schema["function"]["name"] for schema in box.schemas] == ["calculator", "add", "bad"]
    episode = {}
    calls = [
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("calculator", {"expression": "6*7"}),
        MalformedCall("it is no JSON"),
        ToolCall("subtract", {}),
        ToolCall("add", {"a": 1}),
        ToolCall("add", {"a": "1", "b": "2"}, as_text=True),
        ToolCall("bad", {"how": "raise"}),
        ToolCall("bad", {"how": "spin"}),
        ToolCall("add", {"a": 1, "b": 1}),
    ]
    responses = run(box, calls, episode, max_calls=8, deadline_s=0.3)
    assert [r.error for r in responses] == [
        None, None, "malformed", "unknown", "arguments", None, "raised", "hung", "too_many",
    ]  # fmt: skip
    words = [
        "103", "42", "it is no JSON", "no tool 'subtract'. Tools: calculator, add, bad", "b is missing",
        "103", "KeyError: 'nothing there'", "no answer within 0.3 s", "at most 8 calls in one turn",
    ]  # fmt: skip
    assert all(word in response.text for word, response in zip(words, responses, strict=True))
    assert episode == {"calls": 2}
    box.close()


def test_the_log_says_once_in_which_line_a_tool_raised(tmp_path, caplog):
    schema = function_schema("add", "", {"x": NUMBER}, ["x"])
    wrong = FunctionTool(lambda a: a, {}, schema)  # a tool file like this is refused
    box, other = toolbox(tmp_path, BAD), Toolbox({"add": wrong})
    for _ in range(2):
        run(box, [ToolCall("bad", {"how": "raise"})])
        run(other, [ToolCall("add", {"x": 1})])
    unfit, raised = sorted(record.getMessage() for record in caplog.records)
    assert raised.startswith("tool 'bad', called with {'how': 'raise'}, raised KeyError: 'nothing there'\n")
    assert 'tool_functions.py, line 19, in bad: raise KeyError("nothing there")' in raised
    assert "siirl" not in raised and "unexpected keyword argument 'x'" in unfit
    run(box, [ToolCall("bad", {"how": "raise"})])
    slow = toolbox(tmp_path, SLOW)
    run(slow, [ToolCall("slow", {"seconds": 9})], deadline_s=0.1)
    assert len(caplog.records) == 3 and "gave no answer within 0.1 s" in caplog.records[-1].getMessage()
    for used in (box, other, slow):
        used.close()


def test_calls_of_a_turn_run_at_once_and_a_blocking_one_delays_none(tmp_path):
    """The eight answer when all of them are asked, and the one that blocks when they have."""
    meeting = {"class_name": f"{FILE}:Meeting", "config": {"size": 8, "type": "native"}}
    box = toolbox(tmp_path, meeting, BAD)
    calls = [ToolCall("bad", {"how": "block"})] + [ToolCall("meeting", {})] * 8
    responses = run(box, calls, max_calls=9, deadline_s=20)
    assert [(r.error, r.text) for r in responses] == [(None, "None")] + [(None, "met")] * 8
    box.close()


def test_a_tool_says_how_many_calls_it_takes_at_once(tmp_path):
    box = toolbox(tmp_path, {"class_name": f"{FILE}:Counting", "config": {"step": 1, "type": "native"}})
    for _ in range(2):  # each step has an event loop of its own
        responses = run(box, [ToolCall("counting", {})] * 5, max_calls=5)
        assert max(int(response.text) for response in responses) == 2


@pytest.mark.parametrize(
    "side, text",
    [("left", "abcd...(truncated)"), ("right", "(truncated)...wxyz"), ("middle", "ab...(truncated)...yz")],
)
def test_long_responses_are_cut_on_the_side_that_is_configured(side, text):
    assert truncated("abcdefghijklmnopqrstuvwxyz", 4, side) == text
    assert truncated("abcd", 4, side) == "abcd"
    assert truncated("abcdef", 1, "middle") == "...(truncated)..."


def test_python_has_no_more_sandboxes_than_programs_at_once_whatever_threads_call_it(monkeypatch):
    strongest_isolation()  # tries boxes of its own, once in a process
    boxes, start = [], Box._start
    monkeypatch.setattr(Box, "_start", lambda box: (boxes.append(box), start(box)))
    python = PythonTool(max_concurrent=2)
    at_once = threading.Barrier(6)

    def call(number):
        at_once.wait(60)  # each in a thread of its own
        return python({"code": f"print({number})"}, None)

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(call, range(6))) == [f"{number}\n" for number in range(6)]
    assert 1 <= len(boxes) <= 2
    launchers = [psutil.Process(box._process.pid) for box in boxes]
    python.close()
    assert not any(launcher.is_running() for launcher in launchers)


def test_python_runs_in_the_sandbox():
    box = Toolbox({"python": PythonTool(time_s=1, max_concurrent=1)})
    programs = ["print(sum(range(10)))", "1/0", "while True: pass", "x = 1"]
    responses = run(box, [ToolCall("python", {"code": code}) for code in programs], max_calls=4)
    assert [r.text.strip() for r in responses] == [
        "45", "Error: ZeroDivisionError: division by zero", "Error: no end within 1 s.",
        "(nothing was printed)",
    ]  # fmt: skip
    box.close()


@pytest.mark.parametrize(
    "entry, words",
    [
        ("calculator", "must have one of builtin"),
        ({"builtin": "calculator", "function": "a.py:f"}, "must have one of builtin"),
        ({"builtin": "calculater"}, "unknown builtin 'calculater'"),
        ({"builtin": "calculator", "confg": {}}, r"unknown keys \['confg'\]"),
        ({"builtin": "python", "config": {"seconds": 3}}, "it does not take seconds.*Correct config"),
        ({"function": f"{FILE}:nobody"}, "has no 'nobody'"),
        ({"function": f"{FILE}:add"}, "it has no schema"),
        ({"function": "no_such_package.tools.f"}, "cannot be imported"),
        ({"class_name": f"{FILE}:add"}, "is no class"),
        ({"class_name": f"{FILE}:NoTool"}, r"NoTool\(arguments, episode\): it takes no values, not 2"),
    ],
)
def test_a_tool_file_that_cannot_be_used_is_refused_in_words(tmp_path, entry, words):
    with pytest.raises((ConfigError, DagError), match=words):
        toolbox(tmp_path, entry)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"builtin": "calculater"}, "tool 1: unknown builtin 'calculater'"),
        ({"function": f"{FILE}:nobody"}, "has no 'nobody'"),
        ({"function": "no_such_package.tools.f"}, "cannot be imported"),
        ({"builtin": "python", "tool_schema": {"type": "function"}}, "is no function"),
        ({"function": f"{FILE}:add", "tool_schema": schema_of(a={"type": "int"})}, "unknown type 'int'"),
    ],
)
def test_a_tool_file_is_checked_before_any_of_its_code_runs(tmp_path, entry, words):
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [entry]}))
    with pytest.raises((ConfigError, DagError), match=words):
        check_tool_file(MultiTurnConfig(tool_config_path=str(file)), "node 'n'")
    code = tmp_path / "broken.py"
    code.write_text("def tool(): ...\nraise SystemExit")
    file.write_text(yaml.safe_dump({"tools": [{"function": "broken.py:tool", "tool_schema": schema_of()}]}))
    check_tool_file(MultiTurnConfig(tool_config_path=str(file)), "node 'n'")


def function(source: str, properties: dict, required=None, **more) -> tuple[str, dict]:
    """The source of a tool, and its entry in a tool file."""
    schema = function_schema("t", "", properties, list(properties) if required is None else required)
    return f"def t{source}: ...\n", {"function": "code.py:t", "tool_schema": schema} | more


def of_class(source: str, **config) -> tuple[str, dict]:
    return f"class T:\n{source}", {"class_name": "code.py:T", "tool_schema": schema_of(), "config": config}


CALLED = "    def __call__(self, arguments, episode): ...\n"
TEXT = {"type": "string"}
FITTING = [
    function("(at, episode)", {"at": TEXT}),
    function("(at, limit=3, **more)", {"at": TEXT, "limit": NUMBER}, ["at"], config={"index": "x"}),
    function("(at)", {"at": TEXT | {"enum": ["0", "1"]}}, config={"type": "native"}),
    of_class("    async def __call__(self, arguments, episode): ...\n"),
    of_class("    def __init__(self, size=1): ...\n" + CALLED, size=2),
]
UNFIT = [
    (function("(place, episode)", {"at": TEXT}), r"t\(place, episode\) of '.*code.py:t' cannot be "
     r"called with the arguments of its tool_schema \(at\): it needs place, which is not given"),
    (function("(at, limit)", {"at": TEXT, "limit": NUMBER}, ["at"]), "limit has no default, and the schema"),
    (function("(at)", {"at": TEXT}, config={"index": 1}), r"and config \(index\): it does not take index"),
    (function("(at)", {"at": TEXT}, config={"at": 1}), "at is given twice"),
    (function("(at)", {"at": TEXT}, config=[1]), r"config = \[1\] is no mapping of arguments"),
    (function("(at)", {"at": TEXT | {"enum": 5}}), "at: enum = 5 is no list"),
    (function("(at)", {"at": TEXT | {"enum": [0, 1]}}), "enum has 0, which is no string: no call"),
    (function("(at)", {"at": {"type": 5}}), "unknown type 5"),
    (function("(at)", {"at": NUMBER | {"minimum": "0"}}), "minimum = '0' is no number"),
    (function("(at)", {"at": TEXT}, "at"), "required = 'at' is no list"),
    (function("(at)", {"at": TEXT}, tool_schema=None), "it has no schema"),
    (of_class("    def __call__(self, arguments): ...\n"), r"__call__\(self, arguments, episode\): it takes"),
    (of_class("    size = 1\n"), r"Give it __call__\(self, arguments, episode\)"),
    (of_class(CALLED, size=2), "cannot be made of config: it does not take size"),
    (of_class("    def __init__(self, size): ...\n" + CALLED), r"needs size. Add config: {size: ...}"),
    (("def T(): ...\n", of_class("")[1]), "code.py:T' is a function, not a class"),
    (("", {"builtin": "python", "config": {"seconds": 3}}), "it does not take seconds"),
]  # fmt: skip


def tool_file(folder, source: str, entry: dict) -> MultiTurnConfig:
    (folder / "code.py").write_text("x = 1\nif x:\n    raise SystemExit('it was run')\n" + source)
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return MultiTurnConfig(tool_config_path=str(folder / "tools.yaml"))


@pytest.mark.parametrize(("source", "entry"), FITTING)
def test_a_tool_that_takes_what_its_schema_and_config_say_passes_the_check(tmp_path, source, entry):
    check_tool_file(tool_file(tmp_path, source, entry), "node 'scout'")


@pytest.mark.parametrize(("tool", "words"), UNFIT)
def test_a_tool_that_could_not_be_called_is_refused_with_its_node_and_file(tmp_path, tool, words):
    with pytest.raises((ConfigError, DagError), match=words) as caught:
        check_tool_file(tool_file(tmp_path, *tool), "node 'scout'")
    assert re.match(
        "node 'scout': rollout.multi_turn.tool_config_path=.*tools.yaml, tool 1: ", str(caught.value)
    )


def test_tool_files_that_are_missing_empty_or_ambiguous_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_tools(MultiTurnConfig(tool_config_path=str(tmp_path / "none.yaml")), "node 'n'")
    with pytest.raises(ConfigError, match="lists no tools"):
        toolbox(tmp_path)
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        toolbox(tmp_path, {"builtin": "calculator"}, {"builtin": "calculator"})
    assert load_tools(MultiTurnConfig(), "node 'n'").schemas == []


@pytest.mark.parametrize(
    "returned, told",
    [
        ("None", "returned NoneType, not a Parsed"),
        ("('text', [])", "returned tuple, not a Parsed"),
        ("Parsed('', None)", "calls are NoneType, not a tuple"),
        ("Parsed(None)", "content is NoneType, not a text"),
        ("Parsed('', ({'name': 'f'},))", "calls are not all ToolCall"),
    ],
)
def test_a_parser_of_ones_own_that_returns_another_thing_is_named_at_its_first_turn(tmp_path, returned, told):
    file = tmp_path / "mine.py"
    file.write_text(
        f"from siirl.dialect.tool_formats import Parsed\n\n\ndef read(text):\n    return {returned}\n"
    )
    with pytest.raises(ConfigError, match=rf"format={file}:read .*{told}"):
        tool_parser(f"{file}:read")("a turn")
