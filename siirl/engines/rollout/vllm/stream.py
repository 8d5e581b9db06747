"""A stream of requests to a vLLM engine's process, which admits them between two of its steps."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from siirl.engines.rollout.base import Completion, Key, Request, RolloutStream
from siirl.engines.rollout.call_limits import COMPLETE, check_finite
from siirl.engines.rollout.sampling import derive_seed
from siirl.engines.rollout.vllm.engine_process import EngineProcess, Reply
from siirl.errors import ConfigError, EpisodeFailed, RolloutError


@dataclass(frozen=True)
class Pending:
    """A request in the engine's process."""

    key: Key
    num_prompt_tokens: int


class StreamRouter:
    """One process, the streams of several policies that it serves, each of which may have its own thread.

    Whoever listens takes the answers of all, and leaves to each stream its own.
    """

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._lock = threading.Lock()
        self._boxes: dict[str, list[Reply]] = {}
        self._failure: RolloutError | ConfigError | None = None

    def open(self, stream: str) -> None:
        """Take answers for a stream; their names are "STREAM_number"."""
        with self._lock:
            if not self._boxes:
                self._failure = None
            self._boxes[stream] = []

    def submit(self, arrays: dict[str, np.ndarray], first: bool, **values: Any) -> None:
        """Send requests. first: the stream was idle."""
        with self._lock:
            if first:
                self.process.expect()
            self.process.send("submit", arrays, **values)

    def listen(self, stream: str, timeout_s: float) -> list[Reply]:
        """What is there for a stream; waits up to timeout_s for the first. Errors reach all streams."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._boxes[stream]:
                self._receive(timeout_s)
            found, self._boxes[stream] = self._boxes[stream], []
        return found

    def close(self, stream: str, pending: bool) -> None:
        """Forget a stream; if requests of it are pending, those of all streams end."""
        with self._lock:
            self._boxes.pop(stream, None)
            if pending:
                self._failure = RolloutError(
                    f"requests ended: stream {stream!r} of the same engine was closed"
                )
                self.process.ask("abort")

    def _receive(self, timeout_s: float) -> None:
        try:
            replies = self.process.listen(timeout_s)
        except (RolloutError, ConfigError) as error:
            self._failure = error
            raise
        for reply in replies:
            for stream, part in _by_stream(*reply).items():
                if stream in self._boxes:
                    self._boxes[stream].append(part)


def _by_stream(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Reply]:
    """A reply cut into those of each stream; what the engine counted meanwhile goes to the first."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(values["names"]):
        rows.setdefault(name.rpartition("_")[0], []).append(row)
    if len(rows) == 1:
        return {stream: (values, arrays) for stream in rows}
    bounds = np.cumsum(arrays["lengths"])[:-1]
    pieces = {name: np.split(arrays[name], bounds) for name in ("tokens", "log_probs")}
    parts: dict[str, Reply] = {}
    for stream, mine in rows.items():
        own = {name: [values[name][row] for row in mine] for name in ("names", "finish_reasons")}
        stats = {"cached_tokens": 0.0} if parts else values["stats"]
        cut = {name: np.concatenate([pieces[name][row] for row in mine]) for name in pieces}
        parts[stream] = (own | {"stats": stats}, cut | {"lengths": arrays["lengths"][mine]})
    return parts


class StreamedEngine(Protocol):
    """What a stream asks of the engine that it belongs to."""

    name: str
    weight_version: int

    def check_requests(self, requests: Sequence[Request], pending: Sequence[Key]) -> dict[Key, EpisodeFailed]:
        """See VLLMRollout."""
        ...

    def count(self, stats: dict[str, float], prompt_tokens: int) -> None:
        """See VLLMRollout."""
        ...


class VLLMStream(RolloutStream):
    """Requests go to the engine's process at once; it steps whether or not anybody collects."""

    def __init__(
        self, engine: StreamedEngine, router: StreamRouter, dtype: str, adapter: str | None = None
    ) -> None:
        """adapter: name of the LoRA adapter that its requests are for."""
        self._engine, self._router, self._dtype, self._adapter = engine, router, dtype, adapter
        self._pending: dict[str, Pending] = {}  # under the names that the process knows
        self._refused: list[tuple[Key, EpisodeFailed]] = []
        self._num_submitted = 0
        self._name = engine.name
        router.open(self._name)

    @property
    def num_pending(self) -> int:
        return len(self._pending) + len(self._refused)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream; wakes the engine's KV cache. RolloutError also when the process died."""
        if not requests:
            return
        keys = [*(pending.key for pending in self._pending.values()), *(key for key, _ in self._refused)]
        refused = self._engine.check_requests(requests, keys)
        self._refused += refused.items()
        requests = [request for request in requests if request.key not in refused]
        if not requests:
            return
        names = [f"{self._name}_{self._num_submitted + index}" for index in range(len(requests))]
        self._num_submitted += len(requests)
        arrays = {
            "prompts": np.array([token for request in requests for token in request.prompt], np.int64),
            "prompt_lengths": np.array([len(request.prompt) for request in requests], np.int64),
            "seeds": np.array([derive_seed(request.seed, 0) for request in requests], np.int64),
        }
        params = [vars(request.params) for request in requests]
        first = not self._pending
        self._router.submit(arrays, first, names=names, params=params, adapter=self._adapter)
        for name, request in zip(names, requests, strict=True):
            self._pending[name] = Pending(request.key, len(request.prompt))

    def collect(self, timeout_s: float) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream. RolloutError for log-probs that are not finite: the weights are broken."""
        if self._refused or not self._pending:
            refused, self._refused = self._refused, []
            return refused
        replies = self._router.listen(self._name, timeout_s)
        return [answer for reply in replies for answer in self._answers(*reply)]

    def close(self) -> None:
        """See RolloutStream. RolloutError if the process died."""
        pending, self._pending, self._refused = bool(self._pending), {}, []
        self._router.close(self._name, pending)

    def _answers(
        self, values: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """The responses that one step of the engine has ended."""
        reasons, version = values["finish_reasons"], self._engine.weight_version
        bounds = np.cumsum(arrays["lengths"])[:-1]
        parts = (np.split(arrays[name], bounds) for name in ("tokens", "log_probs"))
        completions: list[tuple[Key, Completion]] = []
        broken: list[tuple[Key, EpisodeFailed]] = []
        prompt_tokens = 0
        for name, reason, tokens, log_probs in zip(values["names"], reasons, *parts, strict=True):
            pending = self._pending.pop(name, None)
            if pending is None:
                raise RolloutError(
                    f"rollout engine {self._engine.name!r} answered a request that is not pending."
                )
            prompt_tokens += pending.num_prompt_tokens
            if reason not in COMPLETE:
                text = f"rollout engine {self._engine.name!r} ended the response with {reason}: incomplete."
                broken.append((pending.key, EpisodeFailed(text, kind="request")))
                continue
            completion = Completion(tokens.tolist(), log_probs.tolist(), reason, version)
            completions.append((pending.key, completion))
        check_finite(((f"request {key!r}", completion) for key, completion in completions), self._dtype)
        self._engine.count(values["stats"], prompt_tokens)
        return [*completions, *broken]
