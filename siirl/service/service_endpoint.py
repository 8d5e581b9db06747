"""The HTTP server of the training service: requests to commands, answers to bytes, sessions and names.

consumes: HTTP requests of clients with the token. produces: commands on the desk. waits for: their answers,
for POLL_S at a time. unblocked by: the worker's thread, and `close`.
"""

import asyncio
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from siirl.access import MOST_UNAUTHENTICATED, UnauthenticatedConnections, is_same
from siirl.agents.outside.content import BadRequest, parsed, understood
from siirl.agents.outside.endpoint import http_log, reached_at, run_loop
from siirl.errors import ConfigError, UserError
from siirl.service.commands import (
    BASE,
    PATH,
    AdapterSpec,
    Command,
    CreateModel,
    ForwardBackward,
    LoadState,
    OptimStep,
    Refused,
    Release,
    SaveSampler,
    SaveState,
)
from siirl.service.desk import Desk, LaneFull, Ticket
from siirl.service.wire import MOST_SAMPLES, PROTOBUF, TrainingRequest, adam_step, sample_of

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20
"""The client cuts what it sends at 5 MB."""
POLL_S = 20.0
"""How long an answer is waited for before the client is told to ask again."""
START_S = 30.0
HEARTBEAT_S = 10.0
ROOT = "/api/v1/"
NAME = re.compile(r"\w[\w.-]{0,127}")
UNSERVED = "it trains no adapter on the embedding or the output layer: train_unembed is passed over"
Answer = Callable[[Any, web.Request], Awaitable[Any]]


@dataclass
class _Session:
    seen_s: float
    samplers: dict[str, str] = field(default_factory=dict)
    """Id of a sampling session -> what it samples from."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Of each model that was asked for."""


@dataclass(frozen=True)
class Served:
    """What clients are told of the server."""

    model: str
    """The base, by the name that clients use."""
    longest: int
    """Tokens of a sequence, prompt and response."""
    stops: tuple[int, ...]
    """Tokens that end a response where a request names no others."""


class ServiceEndpoint:
    """A thread with a server, from `start` to `close`."""

    def __init__(self, desk: Desk, served: Served, files: Path, token: str, idle_s: float) -> None:
        """files: of what was saved, MODEL/KIND/NAME. idle_s: after so long in silence a session is over."""
        self.url = ""
        self._desk, self._served, self._files, self._token, self._idle_s = desk, served, files, token, idle_s
        self._sessions: dict[str, _Session] = {}
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._unauthenticated = UnauthenticatedConnections(MOST_UNAUTHENTICATED)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def start(self, host: str, port: int) -> None:
        """Listen. ConfigError if that cannot be."""
        threading.Thread(target=run_loop, args=[self._loop], name="training service", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._listen(host, port), self._loop).result(START_S)

    def close(self) -> None:
        """Answer nobody any more."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _listen(self, host: str, port: int) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for path, answer in self._posts().items():
            app.router.add_post(ROOT + path, partial(self._handle, answer))
        for path, answer in self._gets().items():
            app.router.add_get(ROOT + path, partial(self._handle, answer))
        app.router.add_post(ROOT + "forward_backward", partial(self._handle, self._train, is_json=False))
        app.router.add_route("*", "/{tail:.*}", partial(self._handle, self._nothing, is_json=False))
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=http_log(), shutdown_timeout=1.0
        )
        await self._runner.setup()
        try:
            server = await self._loop.create_server(self._connection, host, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"service.address={host}:{port} cannot be listened on: {error}. Set another one, or port 0, "
                "which is a free one."
            ) from error
        self.url = f"http://{reached_at(host)}:{server.sockets[0].getsockname()[1]}"
        self._looking = asyncio.create_task(self._end_idle_sessions())

    def _connection(self) -> asyncio.Protocol:
        assert self._runner is not None and self._runner.server is not None
        protocol = self._runner.server()
        close = partial(self._loop.call_soon_threadsafe, protocol.force_close)
        self._unauthenticated.come(protocol, "", close)
        return protocol

    async def _end(self) -> None:
        self._looking.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    def _posts(self) -> dict[str, Answer]:
        return {
            "client/config": self._empty,
            "client/dynamic_config": self._empty,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "weights_info": self._weights_info,
        }

    def _gets(self) -> dict[str, Answer]:
        return {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
            "checkpoints": self._checkpoints,
            "training_runs": self._runs,
            "training_runs/{run}": self._run,
            "training_runs/{run}/checkpoints": self._checkpoints,
        }

    async def _handle(self, answer: Answer, request: web.Request, is_json: bool = True) -> web.Response:
        """Answer whoever shows the token, whatever the request is."""
        try:
            if not is_same(request.headers.get("X-API-Key", ""), self._token):
                return _error("X-API-Key is not the token of this server", 401)
            self._unauthenticated.left(request.protocol)
            body = await request.read()
            asked = body
            if is_json:
                asked = parsed(body or b"{}", "the body")
                if not isinstance(asked, dict):
                    raise BadRequest("the body is no JSON object")
            found = await understood_later(answer, asked, request)
            return found if isinstance(found, web.Response) else web.json_response(found)
        except BadRequest as error:
            return _error(str(error), error.status)
        except Refused as error:
            return _error(str(error), 400)
        except LaneFull as error:
            return _error(str(error), 429)

    async def _empty(self, asked: dict, request: web.Request) -> Any:
        return {}

    async def _telemetry(self, asked: dict, request: web.Request) -> Any:
        return {"status": "accepted"}

    async def _nothing(self, asked: Any, request: web.Request) -> Any:
        raise BadRequest(f"{request.method} {request.path} is not served here", status=404)

    async def _capabilities(self, asked: dict, request: web.Request) -> Any:
        told = {"model_name": self._served.model, "max_context_length": self._served.longest}
        return {"supported_models": [told | {"trainable": True, "sampleable": True}]}

    async def _create_session(self, asked: dict, request: web.Request) -> Any:
        id = f"session-{secrets.token_hex(8)}"
        self._sessions[id] = _Session(time.monotonic())
        return {"session_id": id, "type": "create_session", "info_message": f"siirl: {UNSERVED}"}

    async def _heartbeat(self, asked: dict, request: web.Request) -> Any:
        self._session(asked["session_id"])
        return {"type": "session_heartbeat"}

    async def _finish(self, asked: dict, request: web.Request) -> Any:
        self._end_session(request.match_info["session"])
        return {}

    def _session(self, id: str) -> _Session:
        if id not in self._sessions:
            raise BadRequest(f"the session {id!r:.80} is over", status=410)
        self._sessions[id].seen_s = time.monotonic()
        return self._sessions[id]

    def _end_session(self, id: str) -> None:
        if self._sessions.pop(id, None) is not None:
            self._desk.close_lanes(f"{id}:")
            self._desk.submit_own(Release(id))

    async def _end_idle_sessions(self) -> None:
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, self._idle_s / 2))
            now_s = time.monotonic()
            for id in [id for id, one in self._sessions.items() if now_s - one.seen_s > self._idle_s]:
                log.info("session %s is over: nothing was heard of it for %g s", id, self._idle_s)
                self._end_session(id)

    async def _create_model(self, asked: dict, request: web.Request) -> Any:
        model = self._new_model(asked)
        lora = asked.get("lora_config") or {}
        kind = (asked.get("optimizer_config") or {}).get("type", "adamw")

        def make() -> Command:
            self._check_base(asked["base_model"])
            if kind != "adamw":
                raise Refused(f"optimizer {kind!r:.50} is not served: adamw is")
            seed = lora.get("seed")
            seed = secrets.randbelow(1 << 31) if seed is None else int(seed)
            flags = (bool(lora.get("train_attn", True)), bool(lora.get("train_mlp", True)))
            self._sessions[asked["session_id"]].ranks[model] = int(lora["rank"])
            return CreateModel(model, AdapterSpec(int(lora["rank"]), seed, *flags))

        return self._told(self._desk.submit(model, 0, _sound(make)), model)

    def _new_model(self, asked: dict) -> str:
        self._session(asked["session_id"])
        model = f"{asked['session_id']}:train:{int(asked['model_seq_id'])}"
        self._desk.open_lane(model, 0)
        return model

    def _check_base(self, name: str) -> None:
        if name != self._served.model:
            raise Refused(f"base_model {name!r:.200} is not here: this server has {self._served.model}")

    async def _info(self, asked: dict, request: web.Request) -> Any:
        model = self._model(asked)
        data = {"arch": "", "model_name": self._served.model, "tokenizer_id": self._served.model}
        told = {"type": "get_info", "model_id": model, "model_name": self._served.model, "is_lora": True}
        rank = self._sessions[model.partition(":")[0]].ranks.get(model)
        return told | {"lora_rank": rank, "model_data": data}

    def _model(self, asked: dict) -> str:
        model = asked["model_id"]
        self._session(str(model).partition(":")[0])
        if not self._desk.has_lane(model):
            raise BadRequest(f"there is no model {model!r:.100}", status=404)
        return model

    def _submit(self, asked: dict, make: Callable[[], Command]) -> Any:
        model = self._model(asked)
        return self._told(self._desk.submit(model, int(asked["seq_id"]), _sound(make)), model)

    async def _train(self, body: bytes, request: web.Request) -> Any:
        asked = TrainingRequest(body)

        def make() -> Command:
            return ForwardBackward(asked.model, asked.loss, asked.options(), asked.data(), asked.forward_only)

        return self._submit({"model_id": asked.model, "seq_id": asked.number}, make)

    async def _optim_step(self, asked: dict, request: web.Request) -> Any:
        def make() -> Command:
            return OptimStep(asked["model_id"], adam_step(asked["adam_params"]))

        return self._submit(asked, make)

    async def _save_weights(self, asked: dict, request: web.Request) -> Any:
        def make() -> Command:
            name = asked.get("path") or f"{int(asked['seq_id'])}"
            return SaveState(
                asked["model_id"],
                self._path(asked["model_id"], "weights", name),
                bool(asked.get("overwrite")),
            )

        return self._submit(asked, make)

    def _path(self, model: str, kind: str, name: str) -> str:
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise Refused(f"{name!r:.80} is no name: letters, digits, _ . and -, 128 at most")
        return f"tinker://{model}/{kind}/{name}"

    async def _save_sampler(self, asked: dict, request: web.Request) -> Any:
        model = self._model(asked)
        number, name, session = asked.get("sampling_session_seq_id"), asked.get("path"), None
        if number is not None:
            id = model.partition(":")[0]
            session = f"{id}:sample:{int(number)}"
            self._open_sampler(id, session, session)

        def make() -> Command:
            path = None if name is None else self._path(model, "sampler_weights", name)
            if path is None and session is None:
                raise Refused("neither path nor sampling_session_seq_id is set")
            return SaveSampler(model, path, session, bool(asked.get("overwrite")))

        return self._submit(asked, make)

    def _open_sampler(self, session: str, id: str, source: str) -> None:
        self._session(session).samplers.setdefault(id, source)
        self._desk.open_lane(id, None)

    async def _load_weights(self, asked: dict, request: web.Request) -> Any:
        creates = bool(asked.get("session_id"))
        model = self._new_model(asked) if creates else self._model(asked)

        def make() -> Command:
            path = str(asked["path"])
            if creates:
                self._sessions[asked["session_id"]].ranks[model] = self._about(path)["spec"]["rank"]
            return LoadState(model, path, bool(asked.get("optimizer")), creates)

        number = 0 if creates else int(asked["seq_id"])
        return self._told(self._desk.submit(model, number, _sound(make)), model)

    async def _create_sampler(self, asked: dict, request: web.Request) -> Any:
        id = f"{asked['session_id']}:sample:{int(asked['sampling_session_seq_id'])}"
        source, path = BASE, asked.get("model_path")
        if path:
            self._about(path)
            source = str(path)
        else:
            self._check_base(asked["base_model"])
        self._open_sampler(asked["session_id"], id, source)
        return {"sampling_session_id": id, "type": "create_sampling_session"}

    async def _sampler(self, asked: dict, request: web.Request) -> Any:
        id = request.match_info["sampler"]
        source = self._session(id.partition(":")[0]).samplers[id]
        path = source if source.startswith("tinker://") else None
        return {"sampler_id": id, "base_model": self._served.model, "model_path": path}

    async def _sample(self, asked: dict, request: web.Request) -> Any:
        id, count = asked["sampling_session_id"], int(asked.get("num_samples", 1))
        source = self._session(str(id).partition(":")[0]).samplers.get(id)
        if source is None:
            raise BadRequest(f"there is no sampling session {id!r:.100}", status=404)
        make = partial(sample_of, asked, source, self._served.longest, self._served.stops)
        ticket = self._desk.submit(id, int(asked["seq_id"]), _sound(make))
        ids = [f"{ticket.id}:{number}" for number in range(max(0, min(count, MOST_SAMPLES)))]
        return {"request_id": ticket.id, "sample_sequence_ids": ids}

    def _told(self, ticket: Ticket, model: str) -> Any:
        return {"request_id": ticket.id, "model_id": model}

    async def _retrieve(self, asked: dict, request: web.Request) -> Any:
        """The answer, or that it is not there yet. It stays, for a client that did not get it."""
        id = asked["request_id"]
        if (session := self._sessions.get(str(id).partition(":")[0])) is not None:
            session.seen_s = time.monotonic()
        ticket = self._desk.ticket(id)
        if ticket is None:
            raise BadRequest(f"there is no request {id!r:.100}, or no more", status=410)
        done = asyncio.Event()
        self._desk.when_done(ticket, partial(self._loop.call_soon_threadsafe, done.set))
        try:
            async with asyncio.timeout(POLL_S):
                await done.wait()
        except TimeoutError:
            return {"type": "try_again", "request_id": id, "queue_state": "active"}
        if isinstance(ticket.answer, bytes):
            return web.Response(body=ticket.answer, content_type=PROTOBUF)
        if isinstance(ticket.answer, Exception):
            category = "user" if isinstance(ticket.answer, Refused) else "server"
            return {"error": str(ticket.answer), "category": category}
        return ticket.answer

    def _about(self, path: str) -> dict[str, Any]:
        match = PATH.fullmatch(str(path))
        if match is None:
            raise BadRequest(f"{path!r:.200} is no path of weights")
        try:
            return json.loads(self._files.joinpath(*match.groups()).with_suffix(".json").read_text())
        except FileNotFoundError:
            raise BadRequest(f"{path}: nothing was saved there", status=404) from None

    async def _weights_info(self, asked: dict, request: web.Request) -> Any:
        about = self._about(asked["tinker_path"])
        return {"base_model": about["base_model"], "is_lora": True, "lora_rank": about["spec"]["rank"]}

    async def _runs(self, asked: dict, request: web.Request) -> Any:
        runs = [_told_run(self._served.model, *one) for one in self._ranks().items()]
        return {"training_runs": runs, "cursor": _cursor(runs)}

    async def _run(self, asked: dict, request: web.Request) -> Any:
        run, ranks = request.match_info["run"], self._ranks()
        if run not in ranks:
            raise BadRequest(f"there is no training run {run!r:.100}", status=404)
        return _told_run(self._served.model, run, ranks[run])

    def _ranks(self) -> dict[str, int]:
        """Of each model that is there, or has saved something."""
        saved = {
            file.parts[-3]: json.loads(file.read_text())["spec"]["rank"]
            for file in sorted(self._files.glob("*/*/*.json"))
        }
        return saved | {model: rank for one in self._sessions.values() for model, rank in one.ranks.items()}

    async def _checkpoints(self, asked: dict, request: web.Request) -> Any:
        run, found = request.match_info.get("run"), []
        for file in sorted(self._files.glob("*/*/*.json")):
            model, kind, name = file.parts[-3], file.parts[-2], file.name.removesuffix(".json")
            if run in (None, model):
                about = json.loads(file.read_text())
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{name}",
                        "checkpoint_type": "training" if kind == "weights" else "sampler",
                        "time": _when(about["time"]),
                        "tinker_path": f"tinker://{model}/{kind}/{name}",
                        "size_bytes": about["size_bytes"],
                        "public": False,
                    }
                )
        return {"checkpoints": found, "cursor": _cursor(found)}


def _cursor(found: list) -> dict[str, int]:
    return {"offset": 0, "limit": len(found), "total_count": len(found)}


def _told_run(base: str, run: str, rank: int) -> dict[str, Any]:
    """A training run as clients read it."""
    now = _when(time.time())
    told = {"training_run_id": run, "base_model": base, "model_owner": "me", "is_lora": True}
    return told | {"lora_rank": rank, "last_request_time": now}


def _when(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))


def _sound(make: Callable[[], Command]) -> Callable[[], Command]:
    """Refused for whatever reading a request raises."""

    def command() -> Command:
        try:
            return understood("the request cannot be understood", make)
        except BadRequest as error:
            if isinstance(error.__cause__, Refused | UserError):
                raise Refused(str(error.__cause__)) from error
            raise Refused(str(error)) from error

    return command


async def understood_later(answer: Answer, asked: Any, request: web.Request) -> Any:
    """As `understood`, for what takes time."""
    try:
        return await answer(asked, request)
    except (BadRequest, Refused, LaneFull, web.HTTPException, asyncio.CancelledError):
        raise
    except Exception as error:  # the edge to what others sent
        log.debug("a request was not understood", exc_info=True)
        text = f"the request cannot be understood: {type(error).__name__}: {error}"
        raise BadRequest(text[:500]) from error


def _error(text: str, status: int) -> web.Response:
    return web.json_response({"detail": text, "error": text, "category": "user"}, status=status)
