"""The HTTP endpoint of a rank: sessions of episodes, whoever has the token of one.

consumes: HTTP requests of programs, and sessions from the loops of episodes. produces: turns as answers.
waits for: turns, and the programs that it runs. unblocked by: these, deadlines, and `close`.
"""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from siirl.access import MOST_UNAUTHENTICATED, UnauthenticatedConnections, is_same
from siirl.agents.outside import chat_wire, completions_wire, messages_wire, responses_wire
from siirl.agents.outside.chat_wire import returned_reward, reward_of
from siirl.agents.outside.content import BadRequest, parsed, understood
from siirl.agents.outside.episode_session import FLOODED, HUNG, Session
from siirl.agents.outside.exchange import AnswerStream, Asked, Said
from siirl.agents.outside.program import HOST, Program, SessionInfo, Start
from siirl.agents.outside.session_queue import SessionQueue
from siirl.agents.outside.task_sandbox import TaskSandbox
from siirl.errors import ConfigError, EpisodeFailed
from siirl.observe.spans import waits_outside

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 8 << 20
ALIVE_S = 10.0
"""How often a stream says that there will be something."""
BODY_S = 60.0
"""How long a request's body may take to come."""
GRACE_S = 5.0
"""How long a program may go on after its reward."""
START_S = 30.0
CLOSE_S = 0.1
FAREWELL_S = 0.5
"""So long clients that ask are still told that there will be no more episodes."""
LOOK_S = 1.0
"""How often a rank says that it waits for clients."""
WAIT_S, MOST_WAIT_S = 30.0, 300.0
"""How long a client that asks for a session waits for one, unless it says how long, and at most."""
HOSTING = "hosting of a program"
NOT_UNDERSTOOD = "the request cannot be understood"

Handler = Callable[[Session, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Wire:
    """How programs ask for turns, and are answered."""

    asked_of: Callable[[Any], Asked]
    whole: Callable[[Sequence[Said], int], dict[str, Any]]
    """An answer in one piece, of a time in seconds."""
    stream: Callable[[int, bool], AnswerStream]
    """Of a time in seconds; whether it ends with the number of tokens."""
    error_body: Callable[[str, str], dict[str, Any]] = chat_wire.error_body
    """Of a text and a code."""


WIRES = {
    "/v1/chat/completions": Wire(chat_wire.asked_of, chat_wire.completion, chat_wire.Stream),
    "/v1/completions": Wire(completions_wire.asked_of, completions_wire.completion, completions_wire.Stream),
    "/v1/responses": Wire(responses_wire.asked_of, responses_wire.response, responses_wire.Stream),
    "/v1/messages": Wire(
        messages_wire.asked_of, messages_wire.message, messages_wire.Stream, messages_wire.error_body
    ),
}
"""Path -> what is spoken there."""


@dataclass(frozen=True)
class ProgramLimits:
    """What a program may cost."""

    deadline_s: float
    """Its own time in an episode: that in which it does not wait for an answer."""
    max_requests: int
    """Of an episode."""
    max_concurrent: int
    """Programs at once, on each rank."""


class Endpoint:
    """A thread with a server, which runs until `close`, or to the end of the process."""

    def __init__(
        self,
        start: Start | SessionQueue,
        limits: ProgramLimits,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        """start: begins what plays one episode; or where clients come for it. sandbox: settings of the one
        that each episode has; None for none.
        """
        self._sandbox = sandbox
        self._queue = start if isinstance(start, SessionQueue) else None
        self._start: Start = start.start if isinstance(start, SessionQueue) else start
        self.limits = limits
        self.url = ""  # http://HOST:PORT, once it has started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._unauthenticated = UnauthenticatedConnections(MOST_UNAUTHENTICATED + 8 * limits.max_concurrent)
        self._places = asyncio.Semaphore(limits.max_concurrent)
        self._sessions: dict[str, Session] = {}  # by token
        self._told: set[str] = set()
        self._num_events = 0  # requests that have come, or were answered

    def start(self) -> None:
        """Listen. Idempotent; OSError if it cannot, ConfigError for an address that the user gave."""
        if self._loop is not None:
            return
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=run_loop, args=[self._loop], name="endpoint of programs", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_S)

    def close(self) -> None:
        """Answer nobody any more, and end what runs. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(START_S)
            loop.call_soon_threadsafe(loop.stop)

    async def play(self, session: Session) -> None:
        """Let a program play an episode; from another loop. EpisodeFailed if it ends as it should not."""
        assert self._loop is not None
        hosted = asyncio.run_coroutine_threadsafe(self._host(session), self._loop)
        try:
            await asyncio.wrap_future(hosted)
        finally:
            await session.finish()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for prefix in ("", "/v1"):
            app.router.add_get(f"{prefix}/task", self._handler(self._task))
            app.router.add_post(f"{prefix}/reward", self._handler(self._reward))
            app.router.add_post(f"{prefix}/end", self._handler(self._close))
            app.router.add_post(f"{prefix}/exec", self._handler(self._exec))
        app.router.add_get("/v1/models", self._handler(self._models))
        for path, wire in WIRES.items():
            app.router.add_post(path, self._handler(partial(self._turn, wire), wire))
        host, port = HOST, 0
        if self._queue is not None:
            host, port = self._queue.address.host, self._queue.address.port
            for prefix in ("", "/v1"):
                app.router.add_post(f"{prefix}/session", self._session)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=http_log(), shutdown_timeout=1.0
        )
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(self._connection, host, port)
        except (OSError, OverflowError) as error:
            if self._queue is None:
                raise
            raise ConfigError(
                f"actor_rollout_ref.serve.address={host}:{port} cannot be listened on: {error}. Set another "
                "one, or port 0, which is a free one."
            ) from error
        self.url = f"http://{reached_at(host)}:{self._server.sockets[0].getsockname()[1]}"
        if self._queue is not None:
            self._queue.open(self.url)
            self._looking = asyncio.create_task(self._look(self._queue))

    def _connection(self) -> asyncio.Protocol:
        """What answers one that comes: unauthenticated, until it shows the token of a session.

        One that went without is forgotten when it is the oldest: it cannot be closed any more.
        """
        assert self._runner is not None and self._runner.server is not None
        protocol = self._runner.server()
        loop = asyncio.get_running_loop()
        # Of many that come at once the first is not connected yet when the last one does.
        close = partial(loop.call_soon_threadsafe, loop.call_later, CLOSE_S, protocol.force_close)
        self._unauthenticated.come(protocol, HOST, close)
        return protocol

    async def _end(self) -> None:
        hosting = [task for task in asyncio.all_tasks() if task.get_name() == HOSTING]
        for task in hosting:
            task.cancel()
        await asyncio.gather(*hosting, return_exceptions=True)
        if self._queue is not None:
            self._queue.close()
            self._looking.cancel()
            await asyncio.sleep(FAREWELL_S)
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _host(self, session: Session) -> None:
        """Run a program for a session, to its end."""
        task = asyncio.current_task()
        assert task is not None
        task.set_name(HOSTING)
        async with self._places:
            self._sessions[session.token] = session
            try:
                await self._play(session)
            finally:
                del self._sessions[session.token]

    async def _play(self, session: Session) -> None:
        """Run a program, and end it, in the sandbox of the episode if there is one."""
        if self._sandbox is None:
            return await self._play_in(session)
        session.sandbox = await TaskSandbox.open(self._sandbox, session.task)
        try:
            await self._play_in(session)
            if session.rewards is None:
                session.reward(await session.sandbox.score())
        finally:
            await session.sandbox.close()

    async def _play_in(self, session: Session) -> None:
        info = SessionInfo(self.url, f"{self.url}/v1", session.token, session.task)
        program = await self._start(info)
        session.begin()
        try:
            await self._until_over(session, program)
        except EpisodeFailed as error:
            await program.end()
            raise EpisodeFailed(f"{error}{program.output}", error.kind) from None
        finally:
            await program.end()
            if self._queue is not None:
                self._queue.left()

    async def _until_over(self, session: Session, program: Program) -> None:
        ended = asyncio.ensure_future(program.ended())
        try:
            while not ended.done() and not session.over:
                session.changed.clear()
                left_s = None if session.waits_for_us else self.limits.deadline_s - session.own_s
                if left_s is not None and left_s <= 0:
                    raise EpisodeFailed(
                        f"its program took more than serve.deadline_s={self.limits.deadline_s:g} seconds "
                        "besides its requests",
                        HUNG,
                    )
                if left_s is not None and self._queue is not None:
                    left_s = min(left_s, self._queue.address.idle_s - session.idle_s)
                    if left_s <= 0:
                        session.leave(self._queue.address.idle_s)
                        break
                changed = asyncio.ensure_future(session.changed.wait())
                try:
                    await asyncio.wait({ended, changed}, timeout=left_s, return_when="FIRST_COMPLETED")
                finally:
                    changed.cancel()
            if session.failure is not None:
                raise session.failure
            if session.over:
                await asyncio.wait({ended}, timeout=0.0 if self._queue is not None else GRACE_S)
            elif (returned := ended.result()) is not None:
                session.reward(returned_reward(returned, session.models))
        finally:
            if not ended.cancel() and not ended.cancelled():
                ended.exception()  # has been looked at

    def _handler(
        self, answer: Handler, wire: Wire = WIRES["/v1/chat/completions"]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """What answers requests with the token of a session, and no others; errors as clients read them."""

        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._sessions.get(_shown(request))
            self._num_events += 1
            try:
                if session is None or session.over:
                    raise BadRequest("no episode that goes on has this token", "invalid_api_key", 401)
                self._unauthenticated.left(request.protocol)
                session.count_requests()
                return await answer(session, request)
            except BadRequest as error:
                return web.json_response(wire.error_body(str(error), error.code), status=error.status)
            except web.HTTPRequestEntityTooLarge as error:
                assert session is not None
                reason = f"it has sent more than {MAX_BODY_BYTES} bytes in one request"
                session.fail(EpisodeFailed(reason, FLOODED))
                raise error
            finally:
                self._num_events += 1

        return handle

    async def _session(self, request: web.Request) -> web.Response:
        """Give a client the next episode, at the address by which it has found us."""
        assert self._queue is not None
        if not is_same(_shown(request), self._queue.token):
            refusal = chat_wire.error_body("this is not the token of the run", "invalid_api_key")
            return web.json_response(refusal, status=401)
        self._unauthenticated.left(request.protocol)
        try:
            info = await self._queue.take(_wait_s(await _json(request, b"{}")))
        except BadRequest as error:
            return web.json_response(chat_wire.error_body(str(error), error.code), status=error.status)
        answer: dict[str, Any] = {"session": None, "over": self._queue.over}
        if info is not None and info.api_key in self._sessions:
            url = f"http://{request.host}"
            answer["session"] = {
                "url": url,
                "base_url": f"{url}/v1",
                "api_key": info.api_key,
                "task": info.task,
            }
        return web.json_response(answer)

    async def _look(self, queue: SessionQueue) -> None:
        """Say now and again that this rank waits for clients: or it would be taken to be stuck."""
        before = -1
        while True:
            await asyncio.sleep(LOOK_S)
            answers = any(session.waits_for_us for session in self._sessions.values())
            if self._sessions and (not answers or self._num_events != before):
                waits_outside(queue.missing)
            before = self._num_events

    async def _task(self, session: Session, request: web.Request) -> web.Response:
        return web.json_response(session.task)

    async def _models(self, session: Session, request: web.Request) -> web.Response:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "siirl"} for name in session.models
        ]
        return web.json_response({"object": "list", "data": models})

    async def _reward(self, session: Session, request: web.Request) -> web.Response:
        session.reward(understood(NOT_UNDERSTOOD, reward_of, await _json(request), session.models))
        return web.json_response({"ended": True})

    async def _close(self, session: Session, request: web.Request) -> web.Response:
        session.close()
        return web.json_response({"ended": True})

    async def _exec(self, session: Session, request: web.Request) -> web.Response:
        if (sandbox := session.sandbox) is None:
            raise BadRequest("episodes of this run have no sandbox: set serve.sandbox", "not_found", 404)
        asked = await _json(request)
        return web.json_response(await session.while_open(sandbox.exec(asked)))

    async def _turn(self, wire: Wire, session: Session, request: web.Request) -> web.StreamResponse:
        asked = understood(NOT_UNDERSTOOD, wire.asked_of, await _json(request))
        self._tell_unused(asked)
        session.count_requests(asked.num_turns - 1)
        if not asked.streams:
            said = await session.answer(asked)
            return web.json_response(wire.whole(said, int(time.time())))
        return await self._streamed(wire, session, request, asked)

    async def _streamed(
        self, wire: Wire, session: Session, request: web.Request, asked: Asked
    ) -> web.StreamResponse:
        """Answer while the turns are being generated."""
        loop, growing = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Said]]()

        def tell(index: int, said: Said) -> None:  # on the loop of the episode
            loop.call_soon_threadsafe(growing.put_nowait, (index, said))

        answering = asyncio.ensure_future(session.answer(asked, tell))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        stream = wire.stream(int(time.time()), asked.with_usage)
        more = asyncio.ensure_future(growing.get())
        try:
            while not answering.done():
                await asyncio.wait({answering, more}, timeout=ALIVE_S, return_when="FIRST_COMPLETED")
                if more.done():
                    await self._write(request, response, stream.more(*more.result()))
                    more = asyncio.ensure_future(growing.get())
                elif not answering.done():
                    await self._write(request, response, [b": the turn is being generated\n\n"])
            parts: Iterable[bytes] = stream.end(answering.result())
        except BadRequest as error:
            if not response.prepared:
                raise
            body = json.dumps(wire.error_body(str(error), error.code))
            parts = [f"event: error\ndata: {body}\n\n".encode()]
        finally:
            answering.cancel()
            more.cancel()
        await self._write(request, response, parts)
        await response.write_eof()
        return response

    async def _write(
        self, request: web.Request, response: web.StreamResponse, parts: Iterable[bytes]
    ) -> None:
        """Send parts of a stream, which begins with the first."""
        for part in parts:
            if not response.prepared:
                await response.prepare(request)
            await response.write(part)
            self._num_events += 1

    def _tell_unused(self, asked: Asked) -> None:
        """Log parameters that change nothing, each once in a run."""
        for name in asked.unused:
            if name not in self._told:
                self._told.add(name)
                log.warning(
                    "the program sets %s in its requests: sampling is that of the run "
                    "(actor_rollout_ref.rollout), as its log-probs are trained on. This is said once.",
                    name,
                )


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """The thread."""
    loop.run_forever()
    loop.close()


def http_log() -> logging.Logger:
    """aiohttp's log, without a traceback for each request that is no HTTP, which is answered with 400."""
    theirs = HttpProcessingError, web.RequestPayloadError

    def is_ours(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], theirs))

    http_log = log.getChild("http")
    http_log.filters[:] = [is_ours]
    return http_log


def reached_at(host: str) -> str:
    """How a URL names an address that we listen on; all addresses of this machine: its name."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _shown(request: web.Request) -> str:
    """The token that a request shows."""
    token = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return token or request.headers.get("x-api-key", "")


def _wait_s(asked: Any) -> float:
    """How long a client wants to wait for a session: {"wait_s": 30}, or nothing."""
    if not isinstance(asked, dict):
        raise BadRequest("the body is no JSON object")
    wait_s = asked.get("wait_s", WAIT_S)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MOST_WAIT_S:
        raise BadRequest(f"wait_s is {wait_s!r:.50}, not a number of seconds from 0 to {MOST_WAIT_S:g}")
    return wait_s


async def _json(request: web.Request, empty: bytes = b"") -> Any:
    """The value that a request's body is. BadRequest; HTTPRequestEntityTooLarge."""
    if request.headers.get("Content-Encoding", "").strip().lower() == "deflate":
        # aiohttp never ends the body of one that is cut, so its reader would wait for BODY_S
        raise BadRequest("bodies are taken as they are, or as gzip, br or zstd: not as deflate", status=415)
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # nobody waits for the rest of it
        raise BadRequest(f"the body has not come within {BODY_S:g} seconds", "timeout", 408) from None
    except web.RequestPayloadError:
        raise BadRequest("the body is not in the encoding that its head names") from None
    return parsed(body or empty, "the body")
