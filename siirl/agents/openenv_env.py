"""Environments that an OpenEnv server runs: env_path: openenv:http://HOST:PORT. One agent acts.

Messages are JSON over a WebSocket, so that the package is needed by the server only.
"""

import asyncio
import json
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import aiohttp

from siirl.user_code.load_object import load_object

CONNECT_S, CLOSE_S = 30.0, 5.0


class OpenEnv:
    """A session of an episode with the server at an address.

    action: field of the server's action that gets what the agent said; fields: the others, and what they are.
    show: "file.py:fn", whose fn(observation, info) gives what is read: by default the only text in the
    observation, else all of it as JSON. read: "file.py:fn", whose fn(text, info) gives the action, a dict.
    """

    def __init__(
        self,
        address: str,
        action: str = "message",
        fields: dict[str, Any] | None = None,
        show: str | None = None,
        read: str | None = None,
    ):
        scheme, _, place = address.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not place:
            raise ValueError(f"{address!r} is no address: write openenv:http://HOST:PORT.")
        self._url = f"{scheme.replace('http', 'ws')}://{place.rstrip('/')}/ws"
        self._action, self._fields = action, fields or {}
        self._show = load_object(show, "env_kwargs.show") if show else None
        self._read = load_object(read, "env_kwargs.read") if read else None
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._answers: asyncio.Queue[dict[str, Any]] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._info: dict[str, Any] = {}

    def problem(self) -> str | None:
        """Why the server cannot be used, and the fix; None if it answers."""
        try:
            self._ask({"type": "reset", "data": {"seed": 0}}).result(2 * CONNECT_S)
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            return f"no OpenEnv server answers ({type(error).__name__}: {error}). Start it before the run."
        return None

    async def reset(self, task: dict[str, Any], seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode with a seed; what the agent reads."""
        data = await asyncio.wrap_future(self._ask({"type": "reset", "data": {"seed": seed}}))
        return self._text(data["observation"]), self._info

    async def step(self, actions: dict[int, str]) -> tuple[str, float, bool, dict[str, Any]]:
        """Act. ValueError if several agents do."""
        if len(actions) != 1:
            raise ValueError(f"agents {list(actions)} act at once: an OpenEnv environment takes one action")
        (said,) = actions.values()
        action = {**self._fields, self._action: said} if self._read is None else self._read(said, self._info)
        data = await asyncio.wrap_future(self._ask({"type": "step", "data": action}))
        return self._text(data["observation"]), float(data["reward"] or 0), bool(data["done"]), self._info

    def close(self) -> None:
        """End the session."""
        asyncio.run_coroutine_threadsafe(self._end(), _loop()).result(CONNECT_S)

    def _text(self, observation: dict[str, Any]) -> str:
        self._info = {"observation": observation}
        if self._show is not None:
            return self._show(observation, self._info)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

    def _ask(self, message: dict[str, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(self._answer(message), _loop())

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._socket is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=CONNECT_S))
            self._socket = await self._session.ws_connect(self._url, max_msg_size=0)
            self._answers = asyncio.Queue()
            self._reading = asyncio.create_task(self._read_on(self._socket, self._answers))
        assert self._answers is not None
        await self._socket.send_json(message)
        answer = await self._answers.get()
        if answer.get("type") == "error":
            told = answer.get("data", {})
            raise RuntimeError(f"the server says {told.get('code')}: {told.get('message')}")
        return answer["data"]

    async def _read_on(self, socket: aiohttp.ClientWebSocketResponse, answers: asyncio.Queue) -> None:
        """Read all the time, as pings of the server are answered by that: a turn may take minutes."""
        async for frame in socket:
            if frame.type == aiohttp.WSMsgType.TEXT:
                answers.put_nowait(json.loads(frame.data))
        gone = {"code": "CLOSED", "message": "the connection has ended"}
        answers.put_nowait({"type": "error", "data": gone})

    async def _end(self) -> None:
        if self._socket is not None and self._reading is not None:
            with suppress(OSError, aiohttp.ClientError):
                await self._socket.send_json({"type": "close"})  # the server then closes the socket
            await asyncio.wait({self._reading}, timeout=CLOSE_S)
            self._reading.cancel()
            await self._socket.close()
        if self._session is not None:
            await self._session.close()
        self._session = self._socket = None


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all sessions of this process, which runs all the time in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openenv", daemon=True).start()
    return loop
