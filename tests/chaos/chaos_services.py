"""What jobs under chaos ask beside their own processes, and who is struck, too: a service that scores, and an
MCP server with a tool."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import yaml
from held_ports import await_listening, held_port

HOOK = Path(__file__).parent / "hook"
SCORES = """
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import sitecustomize


class Scores(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sitecustomize.reach("scoring")
        digits = sum(character.isdigit() for character in row["solution_str"])
        body = json.dumps(digits / 8 + (0.5 if row["ground_truth"] in row["solution_str"] else 0.0)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Scores).serve_forever()
"""
"""Scores as the reward function of test jobs does."""
TOOL = '''
import sys

import sitecustomize
from mcp.server.mcpserver import MCPServer

server = MCPServer("digits")


@server.tool()
def digits(text: str) -> str:
    """How many digits a text has."""
    sitecustomize.reach("tool")
    return f"{sum(character.isdigit() for character in text)} of {len(text)}"


if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''
CALLS = '''
from siirl.dialect.tool_formats import Parsed, ToolCall


def parse(said):
    """Whatever an agent says asks the tool."""
    return Parsed(said, (ToolCall("digits", {"text": said}),))
'''
LOST = "lost for good"
AWAY_S = {"SIGKILL": 3.0, "SIGSTOP": 12.0}
"""How long a service is away that is started again, or goes on; one that is stopped: beyond all deadlines."""
TOOL_SERVER, TOOL_URL, REWARD_SERVICE = "tool server", "tool server at a URL", "reward service"
SERVICES = (TOOL_URL, TOOL_SERVER, REWARD_SERVICE)


class Service:
    """What a kind of job needs beside it, in the folder of the job; `keys` are the job's."""

    def __init__(self, kind: str, folder: Path):
        self._script = folder / ("scores.py" if kind == REWARD_SERVICE else "tool_server.py")
        self._script.write_text(SCORES if kind == REWARD_SERVICE else TOOL)
        self._variables = {"CHAOS_DIR": str(folder), "PYTHONPATH": str(HOOK)}
        self._process: subprocess.Popen | None = None
        self._timer: threading.Timer | None = None
        self._held = contextlib.ExitStack()
        if kind != TOOL_SERVER:
            self._port = self._held.enter_context(held_port())
            self._start()
        self.keys = self._reward_keys() if kind == REWARD_SERVICE else self._tool_keys(folder)

    def _reward_keys(self) -> list[str]:
        return [
            *("reward_model.reward_manager=remote", "custom_reward_function.path=null"),
            f"reward_model.remote.url=http://127.0.0.1:{self._port}/score",
            *("reward_model.remote.timeout_s=2", "reward_model.remote.away_s=60"),
        ]

    def _tool_keys(self, folder: Path) -> list[str]:
        url = {"url": f"http://127.0.0.1:{self._port}/mcp"} if self._process else {}
        command = {"command": [sys.executable, str(self._script)], "env": self._variables}
        (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [{"mcp": url or command}]}))
        (folder / "calls.py").write_text(CALLS)
        prefix = "actor_rollout_ref.rollout.multi_turn"
        return [
            *(f"{prefix}.enable=true", f"{prefix}.max_assistant_turns=2", f"{prefix}.tool_timeout_s=3"),
            *(f"{prefix}.tool_config_path={folder}/tools.yaml", f"{prefix}.format={folder}/calls.py:parse"),
            *("data.max_response_length=40", "actor_rollout_ref.rollout.agent.max_turn_tokens=4"),
        ]

    def victims(self, held: psutil.Process, phase: str) -> list[int]:
        """The process that is struck. held: the process that is held in the phase."""
        if self._process is not None:
            return [self._process.pid]
        if phase == "tool":
            return [held.pid]
        return [one.pid for one in held.children(recursive=True) if str(self._script) in one.cmdline()]

    def struck(self, how: str) -> None:
        """It has been, and comes back after a while by itself, if anybody but the run cares for it."""
        if self._process is not None and how in AWAY_S:
            self._timer = threading.Timer(AWAY_S[how], self._come_back, [how])
            self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._held.close()

    def _come_back(self, how: str) -> None:
        assert self._process is not None
        if how == "SIGSTOP":
            self._process.send_signal(signal.SIGCONT)
            return
        self._process.wait()
        self._start()

    def _start(self) -> None:
        words = [sys.executable, str(self._script), str(self._port)]
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(words, env=os.environ | self._variables, **nowhere)
        await_listening(self._port, self._process)
