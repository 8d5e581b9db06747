"""A stream of requests to an engine's process, which admits them between two of its steps."""

import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from siirl.data.completions import PAUSED, Completion, Key, PartialCompletion, Request
from siirl.engines.rollout.base import RolloutStream
from siirl.engines.rollout.call_limits import COMPLETE, check_finite
from siirl.engines.rollout.sampling import derive_seed
from siirl.engines.rollout.served.messages import Abort, Answer, Finished, Pause, Submit
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.errors import ConfigError, EpisodeFailed, RolloutError

Asked = tuple[Request, PartialCompletion]
"""What is wanted, and what there is of it."""


class StreamRouter:
    """One process, the streams of several policies that it serves, each of which may have its own thread.

    Whoever listens takes the answers of all, and leaves to each stream its own.
    """

    def __init__(self, process: RecoveringEngine) -> None:
        self.process = process
        self._lock = threading.Lock()
        self._boxes: dict[str, list[Finished]] = {}
        self._failure: RolloutError | ConfigError | None = None

    def open(self, policy: str) -> str:
        """Take answers for a stream of a policy, which may have others; returns its name.

        Those of its requests are "NAME_number".
        """
        with self._lock:
            if not self._boxes:
                self._failure = None
            names = (policy, *(f"{policy}.{number}" for number in range(len(self._boxes))))
            stream = next(name for name in names if name not in self._boxes)
            self._boxes[stream] = []
            return stream

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
        return [*found, Finished(paused.answers, {})]

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
            for stream, answers in _by_stream(finished.answers).items():
                if stream in self._boxes:
                    self._boxes[stream].append(Finished(answers, stats))
                stats = {}


def _by_stream(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    parts: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        parts[answer.key.rpartition("_")[0]].append(answer)
    return parts


class StreamedEngine(Protocol):
    """What a stream asks of the engine that it belongs to."""

    name: str
    weight_version: int

    def check_requests(self, requests: Sequence[Request], pending: Sequence[Key]) -> dict[Key, EpisodeFailed]:
        """See ServedRollout."""
        ...

    def count(
        self, answers: Sequence[Answer], prompt_tokens: int, stats: dict[str, float], reread: int
    ) -> None:
        """See ServedRollout."""
        ...


class EngineStream(RolloutStream):
    """Requests go to the engine's process at once; it steps whether or not anybody collects."""

    def __init__(
        self, engine: StreamedEngine, router: StreamRouter, dtype: str, adapter: str | None = None
    ) -> None:
        """adapter: name of the LoRA adapter that its requests are for."""
        super().__init__()
        self._engine, self._router, self._dtype, self._adapter = engine, router, dtype, adapter
        self._pending: dict[str, Asked] = {}  # under the names that the process knows
        self._held: list[Asked] = []
        self._answered: list[tuple[Key, Completion | EpisodeFailed]] = []  # and not collected
        self._num_submitted = 0
        self._name = router.open(engine.name)

    @property
    def num_pending(self) -> int:
        return len(self._pending) + len(self._held) + len(self._answered)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream; wakes the engine's KV cache. RolloutError also when the process died."""
        if not requests:
            return
        with self.guard.used():
            running = [request.key for request, _ in (*self._pending.values(), *self._held)]
            refused = self._engine.check_requests(requests, [*running, *(key for key, _ in self._answered)])
            self._answered += refused.items()
            self._send([(request, PartialCompletion()) for request in requests if request.key not in refused])

    def _send(self, wanted: Sequence[Asked]) -> None:
        """Have the process work on what is wanted of some responses."""
        if not wanted:
            return
        named = {f"{self._name}_{self._num_submitted + i}": one for i, one in enumerate(wanted)}
        self._num_submitted += len(named)
        drawn = [
            replace(rest, key=name, seed=derive_seed(rest.seed, rest.sample))
            for name, rest in ((name, so_far.rest(request)) for name, (request, so_far) in named.items())
        ]
        self._router.submit(Submit(drawn, self._adapter), first=not self._pending)
        self._pending |= named

    def collect(self, timeout_s: float) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream. RolloutError for log-probs that are not finite: the weights are broken."""
        with self.guard.used():
            if self._pending and not self._answered:
                for finished in self._router.listen(self._name, timeout_s):
                    self._take(finished)
            answered, self._answered = self._answered, []
        return answered

    def pause(self, keys: Collection[Key] | None = None) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream; errors as of collect."""
        with self.guard.used():
            return self._paused(keys)

    def _paused(self, keys: Collection[Key] | None) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        self._hold(keys)
        version = self._engine.weight_version
        held, self._held = self._held, []
        for request, so_far in held:
            if keys is None or request.key in keys:
                self._answered.append((request.key, so_far.completion(version)))
            else:
                self._held.append((request, so_far))
        answered, self._answered = self._answered, []
        return answered

    def hold(self) -> None:
        """See RolloutStream; errors as of collect."""
        super().hold()
        self._hold()

    def _hold(self, keys: Collection[Key] | None = None) -> None:
        named = self._pending.items()
        names = [name for name, (request, _) in named if keys is None or request.key in keys]
        if names:
            for finished in self._router.pause(self._name, names):
                self._take(finished)

    def go_on(self) -> None:
        """See RolloutStream. RolloutError if the process died."""
        held, self._held = self._held, []
        self._send(held)
        super().go_on()

    def close(self) -> None:
        """See RolloutStream. RolloutError if the process died."""
        pending, self._pending, self._held, self._answered = bool(self._pending), {}, [], []
        self._router.close(self._name, pending)

    def _take(self, finished: Finished) -> None:
        """Keep what one step of the engine, or a pause, has ended."""
        completions: list[tuple[Key, Completion]] = []
        prompt_tokens, reread, version = 0, 0, self._engine.weight_version
        for answer in finished.answers:
            asked = self._pending.pop(answer.key, None)
            if asked is None:
                raise RolloutError(
                    f"rollout engine {self._engine.name!r} answered a request that is not pending."
                )
            request, so_far = asked
            reason = answer.completion.finish_reason
            length = len(request.prompt) + len(so_far.token_ids)
            prompt_tokens += length
            if answer.completion.token_ids and (request.start or so_far.token_ids):
                reread += length - 1 - answer.num_cached_tokens  # nobody has read the last one before
            if reason not in (*COMPLETE, PAUSED):
                text = f"rollout engine {self._engine.name!r} ended the response with {reason}: incomplete."
                self._answered.append((request.key, EpisodeFailed(text, kind="request")))
                continue
            part = replace(answer.completion, weight_version=version)
            so_far.extend(part)
            completions.append((request.key, part))
            if so_far.finish_reason is None:
                self._held.append(asked)
            else:
                self._answered.append((request.key, so_far.completion(version)))
        check_finite(((f"request {key!r}", completion) for key, completion in completions), self._dtype)
        self._engine.count(finished.answers, prompt_tokens, finished.stats, reread)
