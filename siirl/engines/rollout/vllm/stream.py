"""A stream of requests to a vLLM engine's process, which admits them between two of its steps."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from siirl.engines.rollout.base import Completion, Key, Request, RolloutStream
from siirl.engines.rollout.call_limits import COMPLETE, PAUSED, check_finite
from siirl.engines.rollout.sampling import derive_seed
from siirl.engines.rollout.vllm.engine_process import EngineProcess
from siirl.engines.rollout.vllm.messages import Abort, Finished, Pause, Response, Submit
from siirl.errors import ConfigError, EpisodeFailed, RolloutError


class StreamRouter:
    """One process, the streams of several policies that it serves, each of which may have its own thread.

    Whoever listens takes the answers of all, and leaves to each stream its own.
    """

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._lock = threading.Lock()
        self._boxes: dict[str, list[Finished]] = {}
        self._failure: RolloutError | ConfigError | None = None

    def open(self, stream: str) -> None:
        """Take answers for a stream; their names are "STREAM_number"."""
        with self._lock:
            if not self._boxes:
                self._failure = None
            self._boxes[stream] = []

    def submit(self, message: Submit, first: bool) -> None:
        """Send requests. first: the stream was idle."""
        with self._lock:
            if first:
                self.process.expect()
            self.process.send(message)

    def listen(self, stream: str, timeout_s: float) -> list[Finished]:
        """What is there for a stream; waits up to timeout_s for the first. Errors reach all streams."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._boxes[stream]:
                self._receive(timeout_s)
            found, self._boxes[stream] = self._boxes[stream], []
        return found

    def pause(self, stream: str, names: list[str]) -> list[Finished]:
        """End requests of a stream: what was there for it, and what there is of those."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            paused = self.process.ask(Pause(names))
            self._receive(0)  # what has completed before
            found, self._boxes[stream] = self._boxes[stream], []
        return [*found, Finished(paused.responses, {})]

    def close(self, stream: str, pending: bool) -> None:
        """Forget a stream; if requests of it are pending, those of all streams end."""
        with self._lock:
            self._boxes.pop(stream, None)
            if pending:
                self._failure = RolloutError(
                    f"requests ended: stream {stream!r} of the same engine was closed"
                )
                self.process.ask(Abort())
                self.process.forget()

    def _receive(self, timeout_s: float) -> None:
        try:
            found = self.process.listen(timeout_s)
        except (RolloutError, ConfigError) as error:
            self._failure = error
            raise
        for finished in found:
            stats = finished.stats  # what the engine counted meanwhile goes to the first stream
            for stream, responses in _by_stream(finished.responses).items():
                if stream in self._boxes:
                    self._boxes[stream].append(Finished(responses, stats))
                stats = {}


def _by_stream(responses: Sequence[Response]) -> dict[str, list[Response]]:
    parts: dict[str, list[Response]] = defaultdict(list)
    for response in responses:
        parts[response.name.rpartition("_")[0]].append(response)
    return parts


class StreamedEngine(Protocol):
    """What a stream asks of the engine that it belongs to."""

    name: str
    weight_version: int

    def check_requests(self, requests: Sequence[Request], pending: Sequence[Key]) -> dict[Key, EpisodeFailed]:
        """See VLLMRollout."""
        ...

    def count(self, responses: Sequence[Response], prompt_tokens: int, stats: dict[str, float]) -> None:
        """See VLLMRollout."""
        ...


class VLLMStream(RolloutStream):
    """Requests go to the engine's process at once; it steps whether or not anybody collects."""

    def __init__(
        self, engine: StreamedEngine, router: StreamRouter, dtype: str, adapter: str | None = None
    ) -> None:
        """adapter: name of the LoRA adapter that its requests are for."""
        self._engine, self._router, self._dtype, self._adapter = engine, router, dtype, adapter
        self._pending: dict[str, Request] = {}  # under the names that the process knows
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
        keys = [*(request.key for request in self._pending.values()), *(key for key, _ in self._refused)]
        refused = self._engine.check_requests(requests, keys)
        self._refused += refused.items()
        requests = [request for request in requests if request.key not in refused]
        if not requests:
            return
        named = {f"{self._name}_{self._num_submitted + i}": request for i, request in enumerate(requests)}
        self._num_submitted += len(named)
        drawn = [
            replace(request, key=name, seed=derive_seed(request.seed, request.sample))
            for name, request in named.items()
        ]
        self._router.submit(Submit(drawn, self._adapter), first=not self._pending)
        self._pending |= named

    def collect(self, timeout_s: float) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream. RolloutError for log-probs that are not finite: the weights are broken."""
        if self._refused or not self._pending:
            refused, self._refused = self._refused, []
            return refused
        found = self._router.listen(self._name, timeout_s)
        return [answer for finished in found for answer in self._answers(finished)]

    def pause(self) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream; errors as of collect."""
        answers: list[tuple[Key, Completion | EpisodeFailed]] = list(self._refused)
        self._refused = []
        if self._pending:
            found = self._router.pause(self._name, list(self._pending))
            answers += [answer for finished in found for answer in self._answers(finished)]
        return answers

    def close(self) -> None:
        """See RolloutStream. RolloutError if the process died."""
        pending, self._pending, self._refused = bool(self._pending), {}, []
        self._router.close(self._name, pending)

    def _answers(self, finished: Finished) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """The responses that one step of the engine, or a pause, has ended."""
        completions: list[tuple[Key, Completion]] = []
        broken: list[tuple[Key, EpisodeFailed]] = []
        prompt_tokens = 0
        for response in finished.responses:
            request = self._pending.pop(response.name, None)
            if request is None:
                raise RolloutError(
                    f"rollout engine {self._engine.name!r} answered a request that is not pending."
                )
            prompt_tokens += len(request.prompt)
            reason = response.completion.finish_reason
            if reason not in (*COMPLETE, PAUSED):
                text = f"rollout engine {self._engine.name!r} ended the response with {reason}: incomplete."
                broken.append((request.key, EpisodeFailed(text, kind="request")))
                continue
            completions.append((request.key, response.at_version(self._engine.weight_version)))
        check_finite(((f"request {key!r}", completion) for key, completion in completions), self._dtype)
        self._engine.count(finished.responses, prompt_tokens, finished.stats)
        return [*completions, *broken]
