"""What clients ask of runs, sessions and saved weights: answered from files and names, without the worker.

What has no sense here is refused with the reason (NOT_SERVED), as the client's NotFoundError: it tries others
again for minutes.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from siirl.agents.outside.content import BadRequest
from siirl.service.saved_weights import OPERATOR, URL_S, Saved, SavedWeights, expiry, when

CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
NOT_SERVED = {
    (
        "POST",
        "sessions/search",
    ): "sessions are not searched here: list_sessions and get_session say which are open",
    ("PUT", "sessions/{session}/project"): "there are no projects here",
    (
        "GET",
        "sessions/{session}/trace_export",
    ): "no trace of a session is kept: siirl view shows the server's",
    ("GET", "audit"): "no audit log is kept: the server's log says what was refused",
    ("POST", "audit"): "no audit log is kept: the server's log says what was refused",
    ("GET", "billing/usage/events"): "nothing is billed here",
    ("POST", "billing/usage/events"): "nothing is billed here",
    ("POST", "auth/token"): "there are no accounts here: a key is all that is asked for",
    ("POST", "create_custom_loss"): "a loss of yours is computed by your client, which sends its gradient",
    ("POST", "join_sampling_session"): "clones of a sampling client pick numbers of their own",
    ("POST", "retrieve_futures"): "answers are asked for one by one (retrieve_future)",
    (
        "POST",
        "cancel_future",
    ): "a request that waits is carried out: finish the session to drop all of its own",
}
"""Method and path of what is not served -> why."""
MOST_LISTED = 1000
TENANT: Any = getattr(web, "RequestKey", lambda name, kind: name)("tenant", str)
"""Of a request: who asks. Releases of aiohttp before RequestKey take a text."""
BODY: Any = getattr(web, "RequestKey", lambda name, kind: name)("body", bytes)
"""Of a request: its bytes."""
Answer = Callable[[Any, web.Request], Awaitable[Any]]


class Sessions(Protocol):
    """What is asked of the server: its address, and who is there."""

    url: str
    sessions: Any

    def _session(self, id: str, request: web.Request) -> Any: ...


class RestAnswers:
    """Handlers of ServiceEndpoint."""

    def __init__(self, server: Sessions, model: str, saved: SavedWeights) -> None:
        """model: the base, by the name that clients use."""
        self._server, self._model, self._saved = server, model, saved

    def routes(self) -> list[tuple[str, str, Answer]]:
        """Method, path and answer of each request."""
        served: list[tuple[str, str, Answer]] = [
            ("POST", "weights_info", self._weights_info),
            ("POST", "copy_weights", self._copy),
            ("GET", "checkpoints", self._checkpoints),
            ("GET", "training_runs", self._runs),
            ("GET", "training_runs/{run}", self._run),
            ("GET", "training_runs/{run}/checkpoints", self._checkpoints),
            ("DELETE", CHECKPOINT, self._delete),
            ("POST", f"{CHECKPOINT}/publish", partial(self._publish, True)),
            ("DELETE", f"{CHECKPOINT}/publish", partial(self._publish, False)),
            ("PUT", f"{CHECKPOINT}/ttl", self._keep_until),
            ("GET", f"{CHECKPOINT}/external_weights_urls", self._urls),
            ("GET", "sessions", self._sessions),
            ("GET", "sessions/{session}", self._session),
            ("GET", "billing/usage/checkpoints/current", self._usage),
        ]
        return [
            *served,
            *((method, path, partial(self._refused, why)) for (method, path), why in NOT_SERVED.items()),
        ]

    async def _refused(self, why: str, asked: dict, request: web.Request) -> Any:
        raise BadRequest(f"{request.path.rpartition('/v1/')[2]} is not served: {why}", status=404)

    def found(self, path: str, request: web.Request, to_change: bool = False) -> Saved:
        """What was saved there, for who asks. BadRequest if there is nothing."""
        try:
            return self._saved.find(path, request[TENANT], to_change)
        except LookupError as error:
            raise BadRequest(str(error), status=404) from error

    def _named(self, request: web.Request, to_change: bool = True) -> Saved:
        at = request.match_info
        return self.found(f"tinker://{at['run']}/{at['kind']}/{at['name']}", request, to_change)

    async def _weights_info(self, asked: dict, request: web.Request) -> Any:
        spec = self.found(asked["tinker_path"], request).about["spec"]
        told = {"base_model": self._model, "is_lora": True, "lora_rank": spec["rank"], "train_unembed": False}
        return told | {"train_mlp": spec["mlp"], "train_attn": spec["attention"]}

    async def _copy(self, asked: dict, request: web.Request) -> Any:
        """Into a model that nobody trains; the same request gives the same."""
        saved, tenant = self.found(asked["source_path"], request), request[TENANT]
        key = request.headers.get("X-Idempotency-Key", str(time.time_ns()))
        number = hashlib.sha256(f"{tenant}\n{saved.path}\n{key}".encode()).hexdigest()[:16]
        session = "-".join(["session", *([tenant] if tenant else []), number])
        return {"tinker_path": self._saved.copy(saved, f"{session}:train:0", {"expires_s": expiry(asked)})}

    async def _checkpoints(self, asked: dict, request: web.Request) -> Any:
        found = self._saved.all(request[TENANT], request.match_info.get("run"))
        return _page("checkpoints", [one.told() for one in reversed(found)], request)

    async def _runs(self, asked: dict, request: web.Request) -> Any:
        return _page("training_runs", list(self._all_runs(request).values()), request)

    async def _run(self, asked: dict, request: web.Request) -> Any:
        run, runs = request.match_info["run"], self._all_runs(request)
        if run not in runs:
            raise BadRequest(f"there is no training run {run!r:.100}", status=404)
        return runs[run]

    def _all_runs(self, request: web.Request) -> dict[str, Any]:
        """Each model that is there, or has saved something, the newest first."""
        tenant, saved = request[TENANT], defaultdict(list)
        for one in self._saved.all(tenant):
            saved[one.model].append(one)
        ranks = {model: found[-1].about["spec"]["rank"] for model, found in saved.items()}
        metadata: dict[str, Any] = {}
        for session in self._server.sessions.values():
            if tenant in (OPERATOR, session.tenant):
                ranks |= {model: one.rank for model, one in session.models.items()}
                metadata |= dict.fromkeys(session.models, session.told["user_metadata"])
        return {
            model: _told_run(self._model, model, ranks[model], saved[model], metadata.get(model))
            for model in reversed(ranks)
        }

    async def _delete(self, asked: dict, request: web.Request) -> Any:
        self._saved.delete(self._named(request))
        return web.Response(status=204)

    async def _publish(self, public: bool, asked: dict, request: web.Request) -> Any:
        self._saved.label(self._named(request), public=public)
        return web.Response(status=204)

    async def _keep_until(self, asked: dict, request: web.Request) -> Any:
        self._saved.label(self._named(request), expires_s=expiry(asked))
        return web.Response(status=204)

    async def _urls(self, asked: dict, request: web.Request) -> Any:
        ends = self._saved.files(self._named(request, to_change=False))
        urls = {name: f"{self._server.url}/api/v1/files/{end}" for name, end in ends.items()}
        return {"urls": urls, "expires": when(time.time() + URL_S)}

    async def file(self, request: web.Request) -> web.StreamResponse:
        """A file by an address that was given out: it asks for no key."""
        at, query = request.match_info, request.query
        try:
            file = self._saved.file(
                at["run"], at["name"], at["file"], query.get("until", ""), query.get("code", "")
            )
        except (PermissionError, ValueError):
            raise web.HTTPForbidden(text="this address is too old, or was not given out here") from None
        if not file.is_file():
            raise web.HTTPNotFound(text="it was deleted")
        return web.FileResponse(file)

    async def _sessions(self, asked: dict, request: web.Request) -> Any:
        tenant = request[TENANT]
        mine = [id for id, one in self._server.sessions.items() if tenant in (OPERATOR, one.tenant)]
        return _page("sessions", mine, request)

    async def _session(self, asked: dict, request: web.Request) -> Any:
        id = request.match_info["session"]
        session = self._server.sessions.get(id)
        if session is None or request[TENANT] not in (OPERATOR, session.tenant):
            raise BadRequest(f"the session {id!r:.80} is over, or was never here", status=404)
        return {
            "training_run_ids": list(session.models),
            "sampler_ids": list(session.samplers),
            **session.told,
        }

    async def _usage(self, asked: dict, request: web.Request) -> Any:
        found = self._saved.all(request[TENANT])
        size = sum(one.about["size_bytes"] for one in found)
        told = {"checkpoint_count": len(found), "size_bytes": size, "size_gigabytes": size / 1e9}
        return {"data": [told]}


def _page(name: str, found: list, request: web.Request) -> dict[str, Any]:
    """The part of a list that is asked for."""
    offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", MOST_LISTED))
    if offset < 0 or limit < 0:
        raise BadRequest(f"offset {offset} and limit {limit}: from 0 on")
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {name: found[offset : offset + limit], "cursor": cursor}


def _told_run(
    base: str, run: str, rank: int, saved: list[Saved], metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A training run as clients read it."""
    last = {kind: one.told() for one in saved for kind in [one.kind]}
    return {
        "training_run_id": run,
        "base_model": base,
        "model_owner": "me",
        "is_lora": True,
        "lora_rank": rank,
        "last_request_time": saved[-1].told()["time"] if saved else when(time.time()),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": metadata,
    }
