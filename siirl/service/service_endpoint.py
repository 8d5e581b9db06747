"""The HTTP server of the training service: requests to commands, answers to bytes, sessions and names.

Who has a key is a tenant, and reaches its own sessions; the server's own key reaches all. What is asked of
files alone is answered by `rest_answers.py`.

consumes: HTTP requests of clients with a key. produces: commands on the desk. waits for: their answers,
for POLL_S at a time. unblocked by: the worker's thread, and `close`.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from siirl.access import MOST_UNAUTHENTICATED, UnauthenticatedConnections, is_same
from siirl.agents.outside.content import BadRequest, parsed
from siirl.agents.outside.endpoint import http_log, reached_at, run_loop
from siirl.errors import ConfigError
from siirl.service.accepted_requests import AcceptedRequests, KeptRequest
from siirl.service.commands import (
    BASE,
    AdapterSpec,
    Command,
    CreateModel,
    ForwardBackward,
    LoadState,
    OptimStep,
    Refused,
    Release,
    SaveExternal,
    SaveSampler,
    SaveState,
)
from siirl.service.desk import ComeBack, Desk, Ticket
from siirl.service.http_edge import Answer, error_answer, sound, understood_later
from siirl.service.request_journal import Kept
from siirl.service.rest_answers import BODY, TENANT, RestAnswers
from siirl.service.saved_weights import OPERATOR, SavedWeights, labels_of, path_of
from siirl.service.sessions import Model, Session, read_sessions, write_sessions, write_status
from siirl.service.wire import MOST_SAMPLES, PROTOBUF, TrainingRequest, adam_step, sample_of

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20
"""The client cuts what it sends at 5 MB."""
MOST_SESSIONS = 1024
"""Of a tenant."""
POLL_S = 20.0
"""How long an answer is waited for before the client is told to ask again."""
START_S = 30.0
LOOK_S = 2.0
"""How often sessions, files and the state that `siirl view` shows are looked after."""
ROOT = "/api/v1/"
UNSERVED = "no adapter is trained on the embedding or the output layer: train_unembed is passed over"


@dataclass(frozen=True)
class Served:
    """What clients are told of the server."""

    model: str
    """The base, by the name that clients use."""
    longest: int
    """Tokens of a sequence, prompt and response."""
    stops: tuple[int, ...]
    """Tokens that end a response where a request names no others."""
    idle_s: float
    """After so long in silence a session is over."""
    most_models: int = 0
    """Adapters of a tenant that train at once; 0: as many as the server has."""


class ServiceEndpoint:
    """A thread with a server, from `start` to `close`."""

    def __init__(self, desk: Desk, served: Served, files: Path, keys: Mapping[str, str]) -> None:
        """files: of what was saved. keys: of each tenant, the server's own under OPERATOR."""
        self.url = ""
        self.sessions: dict[str, Session] = {}
        self._desk, self._served, self._keys = desk, served, dict(keys)
        self._saved = SavedWeights(files, keys[OPERATOR])
        self._file = files.with_name("sessions.json")
        self._accepted = AcceptedRequests(files.with_name("accepted"), desk.is_answered)
        self._rest = RestAnswers(self, served.model, self._saved)
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._unauthenticated = UnauthenticatedConnections(MOST_UNAUTHENTICATED)

    def restore(self, kept: Sequence[Kept], lost: Container[str] = ()) -> list[str]:
        """Go on with the sessions of an earlier server; gives those of `kept` that belong to none of them.

        kept: the models that were trained. lost: those whose requests are all refused. Before `start`.
        """
        models = {one.model: one for one in kept}
        self.sessions |= read_sessions(self._file, self._served.model)
        for id, session in self.sessions.items():
            mine = [*session.models, *(model for model in models if model.startswith(f"{id}:"))]
            for model in dict.fromkeys(mine):  # of one that was refused the answer is kept, too
                if model in lost:
                    self._desk.open_lane(model, None, session.tenant or id)
                    continue
                found = models.pop(model, Kept(model))
                self._desk.restore(model, found.number, session.tenant or id, found.answers)
            for sampler in session.samplers:
                self._desk.open_lane(sampler, None, session.tenant or id)
        return list(models)

    def _keep(self) -> None:
        """Write which sessions there are."""
        write_sessions(self._file, self._served.model, self.sessions)

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

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
        for method, path, answer in (*self._routes(), *self._rest.routes()):
            app.router.add_route(method, ROOT + path, partial(self._handle, answer))
        app.router.add_post(ROOT + "forward_backward", partial(self._handle, self._train, is_json=False))
        app.router.add_get(ROOT + "files/{run}/{name}/{file}", self._rest.file)
        app.router.add_route("*", "/{tail:.*}", partial(self._handle, self._nothing, is_json=False))
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=http_log(), shutdown_timeout=1.0
        )
        await self._runner.setup()
        for kept in self._accepted.read():
            await self._take_again(kept)
        try:
            server = await self._loop.create_server(self._connection, host, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"service.address={host}:{port} cannot be listened on: {error}. Set another one, or port 0, "
                "which is a free one."
            ) from error
        self.url = f"http://{reached_at(host)}:{server.sockets[0].getsockname()[1]}"
        self._looking = asyncio.create_task(self._look_after())

    async def _take_again(self, kept: KeptRequest) -> None:
        """One that an earlier server has accepted."""
        path, body = kept.path.removeprefix(ROOT), kept[BODY]
        posts = {"forward_backward": self._train} | {name: one for _, name, one in self._routes()}
        try:
            asked = body if path == "forward_backward" else parsed(body, "the body")
            await understood_later(posts[path], asked, kept)  # type: ignore[arg-type]
        except (BadRequest, Refused, KeyError) as error:
            log.warning("%s of an earlier server is dropped: %s", kept.id, error)
            self._accepted.drop(*kept.id)

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

    def _routes(self) -> list[tuple[str, str, Answer]]:
        posts: dict[str, Answer] = {
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
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        gets: dict[str, Answer] = {
            "get_server_capabilities": self._capabilities,
            "healthz": self._healthy,
            "samplers/{sampler}": self._sampler,
        }
        return [("POST", *one) for one in posts.items()] + [("GET", *one) for one in gets.items()]

    async def _handle(self, answer: Answer, request: web.Request, is_json: bool = True) -> web.Response:
        """Answer whoever shows a key, whatever the request is."""
        try:
            tenant = self._tenant(request.headers.get("X-API-Key", ""))
            if tenant is None:
                return error_answer("X-API-Key is not a key of this server", 401)
            request[TENANT] = tenant
            self._unauthenticated.left(request.protocol)
            body = request[BODY] = await request.read()
            asked = body
            if is_json:
                asked = parsed(body or b"{}", "the body")
                if not isinstance(asked, dict):
                    raise BadRequest("the body is no JSON object")
            found = await understood_later(answer, asked, request)
            return found if isinstance(found, web.Response) else web.json_response(found)
        except BadRequest as error:
            return error_answer(str(error), error.status)
        except Refused as error:
            return error_answer(str(error), 400)
        except OSError as error:
            return error_answer(f"the server's disk: {error}", 507)
        except ComeBack as error:
            return error_answer(str(error), 429, {"Retry-After": str(math.ceil(error.wait_s))})

    def _tenant(self, key: str) -> str | None:
        """Whose key this is; all are looked at, however early one fits."""
        found = [tenant for tenant, own in self._keys.items() if is_same(key, own)]
        return found[0] if found else None

    async def _empty(self, asked: dict, request: web.Request) -> Any:
        return {}

    async def _healthy(self, asked: dict, request: web.Request) -> Any:
        return {"status": "ok"}

    async def _telemetry(self, asked: dict, request: web.Request) -> Any:
        return {"status": "accepted"}

    async def _nothing(self, asked: Any, request: web.Request) -> Any:
        raise BadRequest(f"{request.method} {request.path} is not served here", status=404)

    async def _capabilities(self, asked: dict, request: web.Request) -> Any:
        told = {"model_name": self._served.model, "max_context_length": self._served.longest}
        return {"supported_models": [told | {"trainable": True, "sampleable": True}]}

    async def _create_session(self, asked: dict, request: web.Request) -> Any:
        tenant = request[TENANT]
        if sum(one.tenant == tenant for one in self.sessions.values()) >= MOST_SESSIONS:
            raise ComeBack(f"{MOST_SESSIONS} sessions of this tenant are open: finish some")
        id = "-".join(["session", *([tenant] if tenant else []), secrets.token_hex(8)])
        told = {name: asked.get(name) for name in ("user_metadata", "display_name")}
        self.sessions[id] = Session(tenant, time.monotonic(), told)
        self._keep()
        return {"session_id": id, "type": "create_session", "warning_message": f"siirl: {UNSERVED}"}

    async def _heartbeat(self, asked: dict, request: web.Request) -> Any:
        self._session(asked["session_id"], request)
        return {"type": "session_heartbeat"}

    async def _finish(self, asked: dict, request: web.Request) -> Any:
        self._session(id := request.match_info["session"], request)
        self._end_session(id)
        return {}

    def _session(self, id: str, request: web.Request) -> Session:
        """One of who asks."""
        session = self.sessions.get(id)
        if session is None or request[TENANT] not in (OPERATOR, session.tenant):
            raise BadRequest(f"the session {id!r:.80} is over", status=410)
        session.seen_s = time.monotonic()
        return session

    def _end_session(self, id: str) -> None:
        if (session := self.sessions.pop(id, None)) is not None:
            self._desk.close_lanes(f"{id}:")
            self._accepted.forget(id)
            if session.tenant == OPERATOR:
                self._desk.forget(id)
            self._desk.submit_own(Release(id))
            self._keep()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._served.idle_s / 2))
            now_s = time.monotonic()
            for id in [id for id, one in self.sessions.items() if now_s - one.seen_s > self._served.idle_s]:
                log.info("session %s is over: nothing was heard of it for %g s", id, self._served.idle_s)
                self._end_session(id)
            for path in self._saved.delete_expired():
                log.info("%s was to be kept until now, and is deleted", path)
            with contextlib.suppress(OSError):  # a full disk; the next one may fit
                write_status(self._file.with_name("status.json"), self.sessions, self._desk.tenants())

    async def _create_model(self, asked: dict, request: web.Request) -> Any:
        lora = asked.get("lora_config") or {}
        kind = (asked.get("optimizer_config") or {}).get("type", "adamw")

        def make() -> Command:
            self._check_base(asked["base_model"])
            if kind != "adamw":
                raise Refused(f"optimizer {kind!r:.50} is not served: adamw is")
            if lora.get("rank") is None:
                raise Refused("lora_config has no rank: adapters are trained here, not all weights")
            seed = lora.get("seed")
            seed = secrets.randbelow(1 << 31) if seed is None else int(seed)
            flags = (bool(lora.get("train_attn", True)), bool(lora.get("train_mlp", True)))
            return CreateModel(model, AdapterSpec(self._add_model(model, int(lora["rank"])), seed, *flags))

        model = self._new_model(asked, request)
        return self._created(model, self._accept(model, 0, make, request))

    def _new_model(self, asked: dict, request: web.Request) -> str:
        session, id = self._session(asked["session_id"], request), asked["session_id"]
        model = f"{id}:train:{int(asked['model_seq_id'])}"
        self._desk.open_lane(model, 0, session.tenant or id)
        return model

    def _add_model(self, model: str, rank: int) -> int:
        """The rank of a model that is new. Refused for one more than its tenant may have."""
        session, most = self.sessions[model.partition(":")[0]], self._served.most_models
        if most:
            mine = [one for one in self.sessions.values() if one.tenant == session.tenant]
            others = (one for session in mine for id, one in session.models.items() if id != model)
            if sum(one.is_there for one in others) >= most:
                raise Refused(
                    f"this tenant trains {most} models already (service.max_models_per_tenant): finish a "
                    "session"
                )
        session.models[model] = Model(rank)
        self._keep()
        return rank

    def _created(self, model: str, ticket: Ticket) -> Any:
        if (one := self.sessions[model.partition(":")[0]].models.get(model)) is not None:
            one.created = ticket
        return self._told(ticket, model)

    def _check_base(self, name: str) -> None:
        if name != self._served.model:
            raise Refused(f"base_model {name!r:.200} is not here: this server has {self._served.model}")

    async def _info(self, asked: dict, request: web.Request) -> Any:
        model = self._model(asked, request)
        data = {"arch": "", "model_name": self._served.model, "tokenizer_id": self._served.model}
        told = {"type": "get_info", "model_id": model, "model_name": self._served.model, "is_lora": True}
        found = self.sessions[model.partition(":")[0]].models.get(model)
        return told | {"lora_rank": found and found.rank, "model_data": data}

    def _model(self, asked: dict, request: web.Request) -> str:
        model = asked["model_id"]
        self._session(str(model).partition(":")[0], request)
        if not self._desk.has_lane(model):
            raise BadRequest(f"there is no model {model!r:.100}", status=404)
        return model

    def _submit(self, asked: dict, request: web.Request, make: Callable[[], Command]) -> Any:
        model = self._model(asked, request)
        return self._told(self._accept(model, int(asked["seq_id"]), make, request), model)

    def _accept(self, model: str, number: int, make: Callable[[], Command], request: web.Request) -> Ticket:
        """The ticket of a training client's request, which is kept until it is answered."""
        if (known := self._desk.ticket(f"{model}:{number}")) is not None:
            return known
        if is_new := not isinstance(request, KeptRequest):
            self._accepted.add(model, number, request)
        try:
            return self._desk.submit(model, number, sound(make), request.content_length or 0, is_new)
        except BaseException:
            self._accepted.drop(model, number)
            raise

    async def _train(self, body: bytes, request: web.Request) -> Any:
        asked = TrainingRequest(body)

        def make() -> Command:
            return ForwardBackward(asked.model, asked.loss, asked.options(), asked.data(), asked.forward_only)

        return self._submit({"model_id": asked.model, "seq_id": asked.number}, request, make)

    async def _optim_step(self, asked: dict, request: web.Request) -> Any:
        def make() -> Command:
            return OptimStep(asked["model_id"], adam_step(asked["adam_params"]))

        return self._submit(asked, request, make)

    async def _save_weights(self, asked: dict, request: web.Request) -> Any:
        def make() -> Command:
            model, name = asked["model_id"], asked.get("path") or f"{int(asked['seq_id'])}"
            path = path_of(model, "weights", name)
            return SaveState(model, path, bool(asked.get("overwrite")), labels_of(asked))

        return self._submit(asked, request, make)

    async def _save_external(self, asked: dict, request: web.Request) -> Any:
        def make() -> Command:
            model = asked["model_id"]
            if asked.get("age_encryption_recipients"):
                raise Refused("age_encryption_recipients: files are not encrypted here; leave it out")
            return SaveExternal(model, path_of(model, "external_weights", asked["path"]), labels_of(asked))

        return self._submit(asked, request, make)

    async def _save_sampler(self, asked: dict, request: web.Request) -> Any:
        model = self._model(asked, request)
        number, name, session = asked.get("sampling_session_seq_id"), asked.get("path"), None
        if number is not None:
            id = model.partition(":")[0]
            session = f"{id}:sample:{int(number)}"
            self._open_sampler(id, session, session, request)

        def make() -> Command:
            path = None if name is None else path_of(model, "sampler_weights", name)
            if path is None and session is None:
                raise Refused("neither path nor sampling_session_seq_id is set")
            return SaveSampler(model, path, session, bool(asked.get("overwrite")), labels_of(asked))

        return self._submit(asked, request, make)

    def _open_sampler(self, session: str, id: str, source: str, request: web.Request) -> None:
        here = self._session(session, request)
        if here.samplers.setdefault(id, source) is source:
            self._keep()
        self._desk.open_lane(id, None, here.tenant or session)

    async def _load_weights(self, asked: dict, request: web.Request) -> Any:
        creates, tenant = bool(asked.get("session_id")), request[TENANT]
        model = self._new_model(asked, request) if creates else self._model(asked, request)

        def make() -> Command:
            try:
                saved = self._saved.find(asked["path"], tenant)
            except LookupError as error:
                raise Refused(str(error)) from error
            if creates:
                self._add_model(model, saved.about["spec"]["rank"])
            return LoadState(model, saved.path, bool(asked.get("optimizer")), creates)

        ticket = self._accept(model, 0 if creates else int(asked["seq_id"]), make, request)
        return self._created(model, ticket) if creates else self._told(ticket, model)

    async def _create_sampler(self, asked: dict, request: web.Request) -> Any:
        id = f"{asked['session_id']}:sample:{int(asked['sampling_session_seq_id'])}"
        source, path = BASE, asked.get("model_path")
        if path:
            source = self._rest.found(path, request).path
        else:
            self._check_base(asked["base_model"])
        self._open_sampler(asked["session_id"], id, source, request)
        return {"sampling_session_id": id, "type": "create_sampling_session"}

    async def _sampler(self, asked: dict, request: web.Request) -> Any:
        id = request.match_info["sampler"]
        source = self._session(id.partition(":")[0], request).samplers[id]
        path = source if source.startswith("tinker://") else None
        return {"sampler_id": id, "base_model": self._served.model, "model_path": path}

    async def _sample(self, asked: dict, request: web.Request) -> Any:
        id, count = asked["sampling_session_id"], int(asked.get("num_samples", 1))
        source = self._session(str(id).partition(":")[0], request).samplers.get(id)
        if source is None:
            raise BadRequest(f"there is no sampling session {id!r:.100}", status=404)
        make = partial(sample_of, asked, source, self._served.longest, self._served.stops)
        ticket = self._desk.submit(id, int(asked["seq_id"]), sound(make), request.content_length or 0)
        ids = [f"{ticket.id}:{number}" for number in range(max(0, min(count, MOST_SAMPLES)))]
        return {"request_id": ticket.id, "sample_sequence_ids": ids}

    def _told(self, ticket: Ticket, model: str) -> Any:
        return {"request_id": ticket.id, "model_id": model}

    async def _retrieve(self, asked: dict, request: web.Request) -> Any:
        """The answer, or that it is not there yet. It stays, for a client that did not get it."""
        id = asked["request_id"]
        self._session(str(id).partition(":")[0], request)
        ticket = self._desk.ticket(id)
        if ticket is None:
            raise BadRequest(f"there is no request {id!r:.100}, or no more", status=410)
        if not ticket.is_done:
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
