"""What every rollout engine offers. Token ids in, token ids out: no tokenizer is involved.

An engine belongs to one data-parallel shard of its node; methods are local to the shard's ranks.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from siirl.data.completions import Completion, Key, PartialCompletion, Request, SamplingParams
from siirl.data.seen import NO_IMAGES, Seen
from siirl.errors import ConfigError, EpisodeFailed, NotSupportedError, RolloutError
from siirl.observe.metrics import Metrics

DRAIN_S = 0.5
"""Longest wait for an answer before a stream that is drained is asked again."""


class StreamGuard:
    """Who may use a stream: the thread that asks, or the engine, which does something else from `hold` to
    `go_on`. The engine comes first, and whoever asks waits for it.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._is_used = False
        self._holder: int | None = None  # the thread that the engine is used by

    @property
    def is_held(self) -> bool:
        """Whether the engine has it, or waits for it."""
        return self._holder is not None

    def hold(self) -> None:
        """Wait until nobody uses the stream, and let nobody else use it. Again: nothing to do."""
        with self._news:
            self._holder = threading.get_ident()
            self._news.wait_for(lambda: not self._is_used)

    def go_on(self) -> None:
        """Let others use it again."""
        with self._news:
            self._holder = None
            self._news.notify_all()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use it alone; waits while it is held by another thread."""
        with self._news:
            mine = (None, threading.get_ident())
            self._news.wait_for(lambda: self._holder in mine and not self._is_used)
            self._is_used = True
        try:
            yield
        finally:
            with self._news:
                self._is_used = False
                self._news.notify_all()


class RolloutStream(ABC):
    """Requests to one engine, each answered as soon as it is complete, while others join and run.

    Used by one thread at a time, on the first rank of the engine's shard; no communication with other ranks.
    Meanwhile another one may use the engine. After an error only `close` is of use.
    """

    runs_in_background: bool = False
    """See RolloutEngine.stream."""

    def __init__(self) -> None:
        self.guard = StreamGuard()

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """Requests submitted and not yet collected."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests; returns without waiting for results.

        RolloutError for a key that is pending already, and for an engine without weights: then none of them
        is added. A request that cannot run is pending too, until `collect` says so.
        """

    @abstractmethod
    def collect(self, timeout_s: float) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """What has completed, in order of completion; waits up to timeout_s for the first.

        EpisodeFailed: this request has no answer (its prompt cannot run, its response is incomplete), the
        others go on. Empty after that time, and at once when
        nothing is pending. An engine without a process of its own works only inside this call. RolloutError
        when the engine failed, died, or hangs.
        """

    def pause(self, keys: Collection[Key] | None = None) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """Take back what is pending: what is not complete ends with finish_reason "paused".

        keys: of the requests that are taken back, by default all; others may be answered, too.
        Such a completion has the tokens so far, maybe none. Submitted again as the end of a prompt (see
        Request.start), under equal weights the response becomes what it would have been. NotSupportedError
        for a stream that cannot; else as `collect`.
        """
        raise NotSupportedError(f"not supported yet: pausing the requests of a {type(self).__name__}")

    def hold(self) -> None:
        """Have nothing of it run in the engine, which will do something else, until `go_on`.

        What is pending stays so. Called by the engine, from any thread; another one that calls the stream
        meanwhile waits.
        """
        self.guard.hold()

    def go_on(self) -> None:
        """Let what was held run again, each response from its tokens on."""
        self.guard.go_on()

    @abstractmethod
    def close(self) -> None:
        """Forget what is pending; the engine can be used otherwise again. Idempotent."""


Interrupt = Callable[[Sequence[Key]], bool]

WeightPart = Literal["merged", "adapter", "base_and_adapter"]
"""Weights as a model directory has them; or an adapter for a base that is there, or is sent along."""
TensorShare = Literal["all", "parts", "unknown"]
"""What a rank keeps of each tensor: all; parts; or parts, but it does not know which."""


class RolloutEngine(ABC):
    """One sampler of one policy.

    Build: `Engine(plan: ModelPlan, cfg: Config, groups: ProcessGroupManager, device)`. While a stream of it
    has pending requests, `generate`, `load_weights` and `sleep` raise RolloutError; the first two do not if
    the stream gives way.
    """

    name: str
    weight_version: int
    """Version that its weights came from; -1 before the first sync."""
    vocabulary: Any = None
    """How text becomes tokens, where that is not the tokenizer's part; see siirl/dialect/template.py."""
    num_open_streams: int = 1
    """Streams of engines of its kind that are open at once on its device, its own too: they share memory."""
    _stream: RolloutStream | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its shard, which has the streams."""
        return True

    @property
    def reads_live(self) -> bool:
        """Whether it takes weights where they are trained (LiveWeights), if its rank has them whole."""
        return False

    @property
    def keeps(self) -> TensorShare:
        """What this rank's share of the engine keeps of each tensor."""
        return "all"

    def kept_boxes(self) -> dict[str, list[Any]] | None:
        """Of a rank that keeps parts: which rectangles of each tensor (Box); None: they are none. Collective
        over the ranks of the shard, as `expect_parts`."""
        raise AssertionError(f"{self.name} keeps whole tensors")

    def expect_parts(self, arriving: Any) -> None:
        """The next `load_weights`, and further ones, bring these parts (Rounds); None: whole tensors."""
        raise AssertionError(f"{self.name} keeps whole tensors")

    @property
    def takes(self) -> WeightPart:
        """What the next `load_weights` must bring; the same on all ranks of the model."""
        return "merged"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        seen: Sequence[Seen] = (),
    ) -> list[list[Completion]]:
        """n completions of each prompt, in order: what a stream of their requests gives until it is empty.

        seeds: one 64-bit int per prompt. seen: the images among the tokens of each; (): none has one.
        The result for a prompt depends on (weights, prompt, params, its seed) alone: not on the other
        prompts of the call nor their order, up to float rounding. Zero prompts give an empty list.
        Collective over the ranks of the shard. RolloutError before the first complete sync, for a prompt
        that cannot run, for log-probs that are not finite, and when the engine dies, hangs or fails;
        NotSupportedError or ConfigError for an engine that takes no images.
        """
        if len(seeds) != len(prompts):
            raise RolloutError(f"{len(prompts)} prompts and {len(seeds)} seeds: each prompt needs one seed.")
        self.check_idle("generate")
        one = replace(params, n=1)
        requests = [
            Request(f"sample {sample} of prompt {number}", prompt, one, seed, sample, seen=shown)
            for number, (prompt, seed, shown) in enumerate(
                zip(prompts, seeds, seen or [NO_IMAGES] * len(prompts), strict=True)
            )
            for sample in range(params.n)
        ]
        for refused in self.check_requests(requests, ()).values():
            raise RolloutError(str(refused))
        if not requests:
            return []
        with self.alone(len(requests)):
            found = self.share(self._drained(requests) if self.leads else None)
        return [found[start : start + params.n] for start in range(0, len(found), params.n)]

    def _drained(self, requests: Sequence[Request]) -> list[Completion]:
        """The completion of each request, by a stream of their own."""
        stream, found = self.new_stream(None), {}
        try:
            stream.submit(requests)
            while stream.num_pending:
                for key, answer in stream.collect(DRAIN_S):
                    if isinstance(answer, EpisodeFailed):
                        raise RolloutError(str(answer)) from answer
                    found[key] = answer
        except BaseException:
            with suppress(RolloutError, ConfigError):  # what went wrong before says more
                stream.close()
            raise
        stream.close()
        return [found[request.key] for request in requests]

    def alone(self, num_requests: int) -> AbstractContextManager[None]:
        """Around `generate`: what runs in the background is held."""
        return self.streams_held()

    @contextmanager
    def streams_held(self) -> Iterator[None]:
        """Have no request of its stream run meanwhile."""
        self.hold_stream()
        yield
        self.stream_goes_on()

    def hold_stream(self) -> None:
        """Have no request of its stream run until `stream_goes_on`."""
        if self._stream is not None:
            self._stream.hold()

    def stream_goes_on(self) -> None:
        """Let the requests that were held run again."""
        if self._stream is not None:
            self._stream.go_on()

    def let_go(self) -> None:
        """Let nobody wait for what the engine does, which has failed: to be called before streams close."""
        if self._stream is not None:
            self._stream.guard.go_on()

    def score(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], top_k: int
    ) -> list[tuple[Tensor, Tensor]]:
        """What the model says at temperature 1 of the tokens of each row from a start, above 0, on.

        (token ids, log-probs) of each row, int64 and float32 [T, 1 + top_k]: of the token that is there, then
        of the top_k likeliest, the likeliest first. NotSupportedError for an engine that cannot.
        """
        raise NotSupportedError(f"not supported yet: rollout engine {self.name!r} as a teacher")

    def stream(self, interrupt: Interrupt | None = None, runs_in_background: bool = False) -> RolloutStream:
        """A new stream of requests; the one before is closed. On the first rank of a shard.

        interrupt: whether `collect` shall come back, after requests with these keys have completed, maybe
        none; asked now and again by engines that work inside `collect`, which else come back when all are
        complete.
        runs_in_background: while its requests are pending, the engine may take weights, under which they go
        on (what they have so far is read again), and may answer `generate`.
        """
        if self._stream is not None:
            self._stream.close()
        self._stream = self.new_stream(interrupt)
        self._stream.runs_in_background = runs_in_background
        return self._stream

    @abstractmethod
    def new_stream(self, interrupt: Interrupt | None) -> RolloutStream:
        """A stream of the engine's kind, beside those that are open."""

    def share(self, value: Any) -> Any:
        """What the first rank of the shard gives, on all its ranks; plain values and records. Collective."""
        return value

    def check_idle(self, what: str, even_giving_way: bool = False) -> None:
        """RolloutError if requests of a stream are pending. what: what cannot be done now."""
        stream = self._stream
        if stream is not None and stream.num_pending and (even_giving_way or not stream.runs_in_background):
            raise RolloutError(
                f"rollout engine {self.name!r} cannot {what} now: {stream.num_pending} requests of its "
                "stream are pending. Collect them, or close the stream."
            )

    def check_requests(self, requests: Sequence[Request], pending: Iterable[Key]) -> dict[Key, EpisodeFailed]:
        """The requests of a stream that cannot run, with the reason. pending: keys of those before.

        RolloutError without weights, and for a key that is used twice.
        """
        check_keys(requests, pending)
        return {}

    @abstractmethod
    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (full shape, dtype) of all that it takes next, under HF names; tied tensors once."""

    def expect_weights(self) -> None:
        """`load_weights` comes next. Wakes the engine, which may get ready beside what is done until then."""
        self.wake()

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, cast to the engine's dtypes; `weight_version` becomes `version`.

        WeightSyncError if a tensor is unknown, missing, repeated or of another shape: the engine then has
        no usable weights (weight_version -1, `generate` raises) until a load succeeds. A tied tensor may
        arrive under any of its names.
        """

    def sleep(self) -> None:
        """Give back device memory between rollouts (weights and KV cache). Nothing to do by default.

        An engine whose weights are gone afterwards sets weight_version to -1, so that the next sync sends
        them again.
        """
        return None

    def wake(self) -> None:
        """Be ready to generate or to take weights again."""
        return None

    def drain_metrics(self) -> Metrics:
        """What the engine counted since the last call; nothing by default."""
        return Metrics()

    def drain_restarts(self) -> int | None:
        """How often its process was started again since the last call; None without one of its own."""
        return None

    def close(self) -> None:
        """Release everything; the engine is not used afterwards."""
        return None


SampleWave = Callable[[Sequence[Request], Interrupt | None], list[Completion]]
"""A completion of each request, which differ in max_tokens and what is drawn at most. The interrupt is told
the keys of requests that have completed since it was asked last; if it says so, the others end as they are,
PAUSED."""


class WaveStream(RolloutStream):
    """The stream of an engine that works inside `collect`: what has come in is one call, a wave.

    What an interrupted wave leaves runs in the next one, as the end of its prompt.
    """

    def __init__(self, engine: RolloutEngine, sample: SampleWave, interrupt: Interrupt | None) -> None:
        """interrupt: see RolloutEngine.stream."""
        super().__init__()
        self._engine, self._sample, self._interrupt = engine, sample, interrupt
        self._waiting: dict[Key, tuple[Request, PartialCompletion]] = {}
        self._refused: dict[Key, EpisodeFailed] = {}

    @property
    def num_pending(self) -> int:
        return len(self._waiting) + len(self._refused)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream."""
        with self.guard.used():
            refused = self._engine.check_requests(requests, [*self._waiting, *self._refused])
            self._refused |= refused
            self._waiting |= {r.key: (r, PartialCompletion()) for r in requests if r.key not in refused}

    def collect(self, timeout_s: float) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream; takes as long as the wave, whatever timeout_s. One that the engine needs to end
        is cut."""
        with self.guard.used():
            return self._collected()

    def _collected(self) -> list[tuple[Key, Completion | EpisodeFailed]]:
        answers: list[tuple[Key, Completion | EpisodeFailed]] = list(self._refused.items())
        waiting, self._waiting, self._refused = self._waiting, {}, {}
        by_params: dict[SamplingParams, list[Request]] = {}
        for request, so_far in waiting.values():
            by_params.setdefault(replace(request.params, max_tokens=1), []).append(so_far.rest(request))
        for requests in by_params.values():
            for request, part in zip(requests, self._sample(requests, self._is_cut), strict=True):
                _, so_far = waiting[request.key]
                so_far.extend(part)
                if so_far.finish_reason is None:
                    self._waiting[request.key] = waiting[request.key]
                else:
                    answers.append((request.key, so_far.completion(part.weight_version)))
        return answers

    def _is_cut(self, ended: Sequence[Key]) -> bool:
        told = self._interrupt is not None and self._interrupt(ended)
        return told or self.guard.is_held

    def pause(self, keys: Collection[Key] | None = None) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream."""
        with self.guard.used():
            answers: list[tuple[Key, Completion | EpisodeFailed]] = list(self._refused.items())
            version, self._refused = self._engine.weight_version, {}
            for key in [key for key in self._waiting if keys is None or key in keys]:
                answers.append((key, self._waiting.pop(key)[1].completion(version)))
        return answers

    def close(self) -> None:
        """See RolloutStream."""
        self._waiting, self._refused = {}, {}


def check_keys(requests: Sequence[Request], pending: Iterable[Key]) -> None:
    """RolloutError for a key that is used twice."""
    used = set(pending)
    for request in requests:
        if request.key in used:
            raise RolloutError(
                f"request key {request.key!r} is pending already: answers could not be told apart."
            )
        used.add(request.key)
