"""Tools of MCP servers: started by a command, or behind a URL; what they are asked and answer."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
from held_ports import await_listening, held_port
from later import needed

from siirl.agents import mcp_tools as mcp_tools_module
from siirl.agents.mcp_tools import mcp_tools
from siirl.agents.tool_files import check_tool_file, check_tools_here, load_tools
from siirl.agents.tools import ToolLimits, run_tools
from siirl.config import load_config
from siirl.dialect.tool_formats import ToolCall
from siirl.errors import ConfigError, EpisodeFailed

needed("mcp", "pip install 'siirl[mcp]'")
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


def serve(script, port):
    """A server behind a URL, which takes connections."""
    process = subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL)
    await_listening(port, process)
    return process


@pytest.fixture
def port():
    with held_port() as held:
        yield held


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("mcp") / "mcp_server.py"  # which is a fork (forked_starts.py)
    file.write_text(SERVER)
    return file


@pytest.fixture(scope="module", params=["stdio", "http"])
def settings(request, script):
    """How the test server is asked."""
    if request.param == "stdio":
        yield {"command": [sys.executable, str(script)]}
        return
    with held_port() as port:
        process = serve(script, port)
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


def struck_during(toolbox, multi_turn, strike, seconds=1.0):
    """The answers to calls during which something happens."""
    timer = threading.Timer(0.3, strike)
    timer.start()
    try:
        return answers(toolbox, multi_turn, ("wait", {"seconds": seconds}), ("wait", {"seconds": seconds}))
    finally:
        timer.join()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_the_calls_of_a_server_that_dies_or_is_stopped_are_made_again(
    how, script, multi_turn, monkeypatch, caplog
):
    monkeypatch.setattr(mcp_tools_module, "SIGN_S", 1.0)
    turns = multi_turn({"mcp": {"command": [sys.executable, str(script)]}}, timeout_s=4)
    toolbox = load_tools(turns, "node 'a'")

    def strike():
        commands = {one: [*filter(None, one.cmdline())] for one in psutil.Process().children()}
        (server,) = (one for one, words in commands.items() if words[-1:] == [str(script)])
        server.send_signal(how)

    try:
        assert answers(toolbox, turns, ("count", {}))[0].text == "1"
        found = struck_during(toolbox, turns, strike)
        assert [(one.text, one.error) for one in found] == [("late", None)] * 2
        assert caplog.text.count("Its calls are made again.") == 1
        assert ("it hangs" in caplog.text) == (how == signal.SIGSTOP)
        assert answers(toolbox, turns, ("count", {}))[0].text == "1"
    finally:
        close(toolbox)


def test_a_tool_that_must_not_act_twice_is_not_called_again(script, multi_turn, caplog):
    turns = multi_turn({"mcp": {"command": [sys.executable, str(script)], "call_again": False}})
    toolbox = load_tools(turns, "node 'a'")
    try:
        with pytest.raises(EpisodeFailed, match=r"server.py.* was lost as it was called") as failed:
            answers(toolbox, turns, ("fail", {"how": "exit"}))
        assert (
            failed.value.kind == "tool" and "Its calls are made no second time (call_again)." in caplog.text
        )
        assert answers(toolbox, turns, ("count", {}))[0].text == "1"
    finally:
        close(toolbox)


@pytest.mark.slow
def test_an_episode_whose_call_ends_its_server_each_time_is_dropped(script, multi_turn):
    turns = multi_turn({"mcp": {"command": [sys.executable, str(script)]}})
    toolbox = load_tools(turns, "node 'a'")
    try:
        with pytest.raises(EpisodeFailed, match=r"server.py.* was lost 3 times as it was called") as failed:
            answers(toolbox, turns, ("fail", {"how": "exit"}))
        assert failed.value.kind == "tool"
        assert answers(toolbox, turns, ("count", {}))[0].text == "1"
    finally:
        close(toolbox)


@pytest.mark.slow
def test_a_server_behind_a_url_may_be_away_for_a_while(script, port, multi_turn, monkeypatch):
    server, made = serve(script, port), []
    turns = multi_turn({"mcp": {"url": f"http://127.0.0.1:{port}/mcp"}}, timeout_s=20)
    toolbox = load_tools(turns, "node 'a'")

    def starts_anew():
        server.kill()
        server.wait()
        made.append(serve(script, port))

    try:
        found = struck_during(toolbox, turns, starts_anew)
        assert [(one.text, one.error) for one in found] == [("late", None)] * 2
        monkeypatch.setattr(mcp_tools_module, "BACK_S", 1.5)
        with pytest.raises(EpisodeFailed, match="/mcp' has been away for"):
            struck_during(toolbox, turns, made[0].kill)
        monkeypatch.setattr(mcp_tools_module, "AGAIN_S", 60.0)  # of the minute nothing is left: one try
        with pytest.raises(EpisodeFailed, match="/mcp' has been away for"):
            answers(toolbox, turns, ("count", {}))
        made.append(serve(script, port))
        assert answers(toolbox, turns, ("count", {}))[0].text == "1"
    finally:
        close(toolbox)
        for process in (server, *made):
            process.kill()
            process.wait()


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
        ({"mcp": {"command": "x", "call_again": 0}}, "call_again = 0 is neither true nor false"),
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


def test_a_server_that_is_none_is_refused_with_the_reason(script, port, tmp_path):
    for settings, words in (
        ({"command": [sys.executable, "-c", "print('hello')"]}, "gives no tools"),
        ({"url": f"http://127.0.0.1:{port}/mcp"}, "gives no tools: .*onnect"),
        (
            {"command": [sys.executable, str(script)], "tools": ["sum"]},
            "has no tool 'sum'. It has: add, count",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            mcp_tools(settings, "node 'a'", tmp_path, 30)
