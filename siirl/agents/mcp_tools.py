"""Tools of an MCP server: one that a command starts, asked over its stdin and stdout, or one behind a URL.

The package is imported when a server is asked.
"""

import asyncio
import atexit
import base64
import json
import logging
import os
import shlex
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from siirl.agents.shown import PLACE, Shown
from siirl.agents.user_thread import Hung
from siirl.errors import ConfigError, EpisodeFailed
from siirl.user_code.extras import missing_extra

KEYS = ("command", "url", "env", "token_env", "tools", "max_concurrent", "call_again")
START_S, CLOSE_S = 120.0, 10.0
"""Longest wait for a server that starts, or ends."""
BACK_S, AGAIN_S, TRY_S = 60.0, 0.5, 10.0
"""How long a server that was lost may be away, the wait between two tries to reach it, and what a try has."""
SIGN_S = 5.0
"""A server that has not answered a call in time, and then does not say what its tools are, hangs."""
MOST_LOST = 3
"""How often one call may lose its server: beyond that, the call may be what ends it."""
log = logging.getLogger(__name__)


def check_mcp(settings: Any, who: str) -> None:
    """ConfigError unless settings say how a server is asked: {command: ...} or {url: ...}, and what else."""
    given = settings if isinstance(settings, dict) else {}
    if sum(key in given for key in ("command", "url")) != 1 or set(given) - set(KEYS):
        raise ConfigError(
            f"{who}: mcp = {settings!r} must have command or url, and may have {', '.join(KEYS[2:])}. Write "
            "e.g. mcp: {command: python server.py}."
        )
    url, tools = given.get("url", "http://"), given.get("tools", [])
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{who}: mcp.url = {url!r} is no address. Write http://HOST:PORT/mcp.")
    if not isinstance(tools, list) or not all(isinstance(name, str) for name in tools):
        raise ConfigError(f"{who}: mcp.tools = {tools!r} is no list of names. Write tools: [search].")
    if not isinstance(given.get("env", {}), dict):
        raise ConfigError(f"{who}: mcp.env = {given['env']!r} is no mapping. Write env: {{NAME: value}}.")
    if not isinstance(given.get("call_again", True), bool):
        raise ConfigError(f"{who}: mcp.call_again = {given['call_again']!r} is neither true nor false.")
    if "command" in given and not _words(given["command"]):
        raise ConfigError(f"{who}: mcp.command = {given['command']!r} is no command. Write python server.py.")


def check_mcp_here(settings: dict[str, Any], who: str) -> None:
    """ConfigError if this machine lacks the package, or the program of the command."""
    if problem := missing_extra("mcp"):
        raise ConfigError(f"{who}: {problem}")
    token = settings.get("token_env")
    if token is not None and not os.environ.get(token):
        raise ConfigError(f"{who}: mcp.token_env = {token!r}: there is no such environment variable. Set it.")
    program = (_words(settings.get("command")) or [""])[0]
    if program and shutil.which(program) is None:
        raise ConfigError(f"{who}: mcp.command: there is no program {program!r}. Install it, or correct it.")


def mcp_tools(settings: dict[str, Any], who: str, folder: Path, timeout_s: float) -> list["McpTool"]:
    """The tools of a server, which is started or asked now, or those of them that settings name.

    folder: where a script of the command may be. timeout_s: of a call. ConfigError if the server gives no
    tools, or lacks one that is named.
    """
    check_mcp_here(settings, who)
    server = McpServer(settings, who, folder, timeout_s)
    found = {tool.name: tool for tool in server.start()}
    names = settings.get("tools") or list(found)
    absent = [name for name in names if name not in found]
    if absent or not names:
        server.close()
        raise ConfigError(
            f"{who}: {server} has no tool {', '.join(map(repr, absent)) or 'at all'}. It has: "
            f"{', '.join(found) or 'none'}."
        )
    most = settings.get("max_concurrent", 0)
    return [McpTool(server, found[name], most) for name in names]


class McpTool:
    """One tool of a server. What the server calls an error is a text for the model, too."""

    def __init__(self, server: "McpServer", tool: Any, max_concurrent: int):
        self.max_concurrent = max_concurrent
        self.patience_s = server.patience_s
        self._server, self._name = server, tool.name
        self.schema = {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }

    async def __call__(self, arguments: dict[str, Any], episode: Any) -> str | Shown:
        """What the server answers, its texts and images one below the other."""
        return _text(await self._server.call(self._name, arguments))

    def close(self) -> None:
        """End the server, with all of its tools."""
        self._server.close()


class McpServer:
    """A session with a server, shared by all episodes of a rank, on the event loop of a thread.

    consumes: calls from threads of tools. produces: their results. waits for: the server. unblocked by: its
    answer, or the deadline of the call. A session whose server died or hangs is restarted, and the calls
    that it had are made again, unless settings say `call_again: false`: a model reads nothing of what its
    machines did.
    """

    def __init__(self, settings: dict[str, Any], who: str, folder: Path, timeout_s: float):
        self._settings, self._who, self._folder = settings, who, folder
        self._timeout_s = timeout_s
        self._calls_again = settings.get("call_again", True)
        self.patience_s = MOST_LOST * (timeout_s + SIGN_S + CLOSE_S) + BACK_S + TRY_S
        """What a call may take beside its deadline, if its server is lost."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._client: Any = None
        self._session: asyncio.Task[None] | None = None
        self._away_since_s: float | None = None
        """When it was first not to be reached; None: it was, the last time."""
        self._beginning = asyncio.Lock()
        self._end = asyncio.Event()

    def __str__(self) -> str:
        return f"the MCP server {self._settings.get('command') or self._settings.get('url')!r}"

    def start(self) -> list[Any]:
        """Begin a session; its tools. ConfigError if the server does not answer."""
        self._thread.start()
        atexit.register(self.close)
        try:
            return self._ask(self._tools()).result(START_S)
        except Exception as error:  # the edge to the server
            self.close()
            raise ConfigError(
                f"{self._who}: {self} gives no tools: {_shown(error)}. It has {START_S:g} s; run it by hand."
            ) from error

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a call, from any event loop."""
        return await asyncio.wrap_future(self._ask(self._call(name, arguments)))

    def close(self) -> None:
        """End the session, and a server that a command has started. Once."""
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):  # its process ends with this one, whose end of the pipe it reads
            self._ask(self._finish()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _ask(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _tools(self) -> list[Any]:
        client, found, cursor = await self._begun(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a call, made again where its server was lost. Hung if the server is there and late.

        EpisodeFailed for a server that does not come back, or that is lost by this call again and again.
        """
        from mcp import MCPError

        num_lost, hung = 0, False
        while True:
            session, began_s = None, time.monotonic()
            try:
                client = await asyncio.wait_for(self._begun(), max(TRY_S, BACK_S - self._away_s()))
                session, self._away_since_s = self._session, None
                return await client.call_tool(name, arguments, self._timeout_s)
            except Exception as error:  # the edge to the server
                late = isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT
                if late and (hung or await self._says_its_tools(client)):
                    raise Hung(f"no answer within {self._timeout_s:g} s") from None
                if isinstance(error, MCPError) and not late and not _is_loss(error):
                    raise
                hung, why = hung or late, "it hangs" if late else _shown(error)
            if session is None:
                self._away_since_s = self._away_since_s or began_s
                if self._away_s() >= BACK_S:
                    raise EpisodeFailed(f"{self} has been away for {self._away_s():.0f} s: {why}", "tool")
                await asyncio.sleep(AGAIN_S)
                continue
            if session is self._session:
                what = "again" if self._calls_again else "no second time (call_again)"
                log.warning(
                    "%s was lost, as tool %r was called: %s. Its calls are made %s.", self, name, why, what
                )
                await self._finish()
            num_lost += 1
            if not self._calls_again:
                raise EpisodeFailed(f"{self} was lost as it was called: {why}", "tool")
            if num_lost >= MOST_LOST:
                raise EpisodeFailed(f"{self} was lost {num_lost} times as it was called: {why}", "tool")

    def _away_s(self) -> float:
        return 0.0 if self._away_since_s is None else time.monotonic() - self._away_since_s

    async def _says_its_tools(self, client: Any) -> bool:
        try:
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), SIGN_S)
        except Exception:  # noqa: BLE001 - the edge to the server
            return False
        return True

    async def _begun(self) -> Any:
        """The client of a session that goes on. What keeps it from beginning is raised."""
        async with self._beginning:
            if self._session is None:
                ready = self._loop.create_future()
                self._end = asyncio.Event()
                self._session = self._loop.create_task(self._serve(ready, self._end))
                try:
                    self._client = await ready
                except BaseException:
                    self._session.cancel()
                    self._session = None
                    raise
            return self._client

    async def _serve(self, ready: asyncio.Future[Any], end: asyncio.Event) -> None:
        """Hold a session until its end: what it opens must be closed by the same task."""
        from mcp import Client

        try:
            async with Client(self._transport()) as client:
                ready.set_result(client)
                await end.wait()
        except BaseException as error:  # noqa: BLE001 - the edge to the server
            if not ready.done():
                ready.set_exception(_first(error))

    async def _finish(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._end.set()
            await asyncio.wait({session}, timeout=CLOSE_S)
            session.cancel()  # one that does not end

    def _transport(self) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        if "command" in self._settings:
            program, *rest = _words(self._settings["command"])
            env = {str(name): str(value) for name, value in self._settings.get("env", {}).items()}
            return StdioServerParameters(
                command=program, args=[_beside(word, self._folder) for word in rest], env=env
            )
        if "token_env" not in self._settings:
            return streamable_http_client(self._settings["url"])
        import httpx2

        token = os.environ[self._settings["token_env"]]
        client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {token}"}, timeout=httpx2.Timeout(30, read=self._timeout_s + 1)
        )
        return streamable_http_client(self._settings["url"], http_client=client)


def _shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


CONNECTION_CLOSED, REQUEST_TIMEOUT = -32000, -32001
"""Codes of the errors that a call gets whose connection ends, or that is late."""
GONE = ("Session terminated", "Server returned an error response")
"""What the package says if another server answers, or a proxy whose server is away."""


def _is_loss(error: Any) -> bool:
    return error.code == CONNECTION_CLOSED or error.message in GONE


def _words(command: Any) -> list[str]:
    """A command as words; none if it is none."""
    if isinstance(command, str):
        return shlex.split(command)
    return [str(word) for word in command] if isinstance(command, Sequence) else []


def _beside(word: str, folder: Path) -> str:
    """A script that is not in the working folder but beside the tool file, by its path."""
    is_there = word.endswith(".py") and not Path(word).is_file() and (folder / word).is_file()
    return str(folder / word) if is_there else word


def _text(result: Any) -> str | Shown:
    images = [base64.b64decode(block.data) for block in result.content if block.type == "image"]
    texts = [_block_text(block, bool(images)) for block in result.content]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(texts)
    text = f"Error: {text}" if result.is_error else text
    return Shown(text, tuple(images)) if images else text


def _block_text(block: Any, beside_images: bool) -> str:
    """A block of an answer in words; beside images, <image> is the place of one and nothing else."""
    if block.type == "image":
        return PLACE
    if block.type != "text":
        return f"({block.type} left out)"
    return block.text.replace(PLACE, "(image)") if beside_images else block.text


def _first(error: BaseException) -> Exception:
    """The first of the errors of a task group, which wraps what happens in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
