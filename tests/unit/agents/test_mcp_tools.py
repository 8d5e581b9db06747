"""Tools of MCP servers: started by a command, or behind a URL; what they are asked and answer."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from siirl.agents.mcp_tools import mcp_tools
from siirl.agents.tool_files import check_tool_file, check_tools_here, load_tools
from siirl.agents.tool_parsers import ToolCall
from siirl.agents.tools import ToolLimits, run_tools
from siirl.config import load_config
from siirl.errors import ConfigError

pytest.importorskip("mcp", reason="pip install 'siirl[mcp]'")
pytestmark = pytest.mark.heavy

SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")
calls = 0

@server.tool()
def add(first: int, second: int = 1) -> int:
    """The sum of two numbers."""
    return first + second

@server.tool()
def count() -> int:
    """How often it has been called."""
    global calls
    calls += 1
    return calls

@server.tool()
def fail(how: str) -> str:
    """Go wrong."""
    if how == "exit":
        os._exit(3)
    raise ValueError("out of stock")

@server.tool()
async def wait(seconds: float) -> str:
    """Answer late."""
    await asyncio.sleep(seconds)
    return "late"

if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return file


@pytest.fixture(scope="module", params=["stdio", "http"])
def settings(request, script):
    """How the test server is asked."""
    if request.param == "stdio":
        yield {"command": [sys.executable, str(script)]}
        return
    port = free_port()
    process = subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
    yield {"url": f"http://127.0.0.1:{port}/mcp"}
    process.terminate()
    process.wait(20)


@pytest.fixture
def multi_turn(tmp_path):
    """A configuration whose tool file lists such servers."""

    def make(*entries, timeout_s=60):
        file = tmp_path / "tools.yaml"
        file.write_text(f"tools: {list(entries)!r}")
        prefix = "actor_rollout_ref.rollout.multi_turn"
        keys = [
            "enable=true",
            f"tool_config_path={file}",
            f"tool_timeout_s={timeout_s}",
            "max_parallel_calls=99",
        ]
        return load_config([f"{prefix}.{key}" for key in keys]).actor_rollout_ref.rollout.multi_turn

    return make


def answers(toolbox, multi_turn, *calls):
    """The responses to calls of one turn."""
    made = [ToolCall(name, arguments) for name, arguments in calls]
    return asyncio.run(run_tools(made, toolbox, SimpleNamespace(state={}), ToolLimits.of(multi_turn)))


def close(toolbox):
    toolbox.close()
    for tool in toolbox.tools.values():
        tool.close()


def test_64_calls_are_answered_as_the_server_answers(settings, multi_turn):
    turns = multi_turn({"mcp": settings})
    toolbox = load_tools(turns, "node 'a'")
    try:
        assert set(toolbox.tools) == {"add", "count", "fail", "wait"}
        schema = toolbox.tools["add"].schema["function"]
        assert schema["description"] == "The sum of two numbers." and schema["parameters"]["required"] == [
            "first"
        ]
        made = [("add", {"first": number, "second": number**2}) for number in range(64)]
        found = answers(toolbox, turns, *made)
        assert [one.text for one in found] == [str(n + n**2) for n in range(64)]
        assert answers(toolbox, turns, ("add", {"first": 4}))[0].text == "5"
        (wrong,) = answers(toolbox, turns, ("add", {"first": "four"}))
        assert wrong.error == "arguments" and "first must be integer" in wrong.text
        (told,) = answers(toolbox, turns, ("fail", {"how": "raise"}))
        assert told.error is None and told.text.startswith("Error: ") and "fail" in told.text
        first, second = (int(answers(toolbox, turns, ("count", {}))[0].text) for _ in range(2))
        assert second == first + 1  # one session, one server
    finally:
        close(toolbox)


def test_a_call_that_is_late_hangs_alone(settings, multi_turn):
    turns = multi_turn({"mcp": settings}, timeout_s=3)
    toolbox = load_tools(turns, "node 'a'")
    try:
        late, right = answers(toolbox, turns, ("wait", {"seconds": 30}), ("add", {"first": 1}))
        assert late.error == "hung" and right.text == "2"
        assert answers(toolbox, turns, ("add", {"first": 2}))[0].text == "3"
    finally:
        close(toolbox)


def test_a_server_that_dies_costs_a_call_and_is_started_again(script, multi_turn):
    turns = multi_turn({"mcp": {"command": [sys.executable, str(script)]}})
    toolbox = load_tools(turns, "node 'a'")
    try:
        assert answers(toolbox, turns, ("count", {}))[0].text == "1"
        assert answers(toolbox, turns, ("fail", {"how": "exit"}))[0].error == "raised"
        assert answers(toolbox, turns, ("count", {}))[0].text == "1"
    finally:
        close(toolbox)


def test_some_tools_of_a_server_and_a_script_beside_the_file(script, tmp_path, multi_turn, monkeypatch):
    (tmp_path / "beside.py").write_text(SERVER)
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    turns = multi_turn({"mcp": {"command": "python beside.py", "tools": ["count"]}})
    toolbox = load_tools(turns, "node 'a'")
    try:
        assert list(toolbox.tools) == ["count"] and answers(toolbox, turns, ("count", {}))[0].text == "1"
    finally:
        close(toolbox)


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"mcp": {}}, "must have command or url"),
        ({"mcp": {"command": "x", "url": "http://y"}}, "must have command or url"),
        ({"mcp": {"command": "x", "arguments": []}}, "may have env, token_env, tools, max_concurrent"),
        ({"mcp": {"url": "localhost:8000"}}, "is no address"),
        ({"mcp": {"command": ""}}, "is no command"),
        ({"mcp": {"url": "http://y", "tools": "a"}}, "is no list of names"),
        ({"mcp": {"url": "http://y"}, "tool_schema": {}}, r"Remove \['tool_schema'\]"),
    ],
)
def test_settings_that_name_no_server_are_refused_by_the_check(entry, words, multi_turn):
    with pytest.raises(ConfigError, match=words):
        check_tool_file(multi_turn(entry), "node 'a'")


def test_what_this_machine_lacks_is_said_before_a_start(multi_turn, monkeypatch):
    with pytest.raises(ConfigError, match="there is no program 'no-such-server'"):
        check_tools_here(multi_turn({"mcp": {"command": "no-such-server --fast"}}), "node 'a'")
    with pytest.raises(ConfigError, match="no such environment variable"):
        check_tools_here(multi_turn({"mcp": {"url": "http://y", "token_env": "NO_SUCH_TOKEN"}}), "node 'a'")
    find = importlib.util.find_spec
    hidden = ("mcp",)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    with pytest.raises(
        ConfigError, match=r"package mcp is not installed. Install it: pip install 'siirl\[mcp\]'"
    ):
        check_tools_here(multi_turn({"mcp": {"url": "http://y"}}), "node 'a'")


def test_a_server_that_is_none_is_refused_with_the_reason(script, tmp_path, monkeypatch):
    for settings, words in (
        ({"command": [sys.executable, "-c", "print('hello')"]}, "gives no tools"),
        ({"url": f"http://127.0.0.1:{free_port()}/mcp"}, "gives no tools: .*onnect"),
        (
            {"command": [sys.executable, str(script)], "tools": ["sum"]},
            "has no tool 'sum'. It has: add, count",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            mcp_tools(settings, "node 'a'", tmp_path, 30)
