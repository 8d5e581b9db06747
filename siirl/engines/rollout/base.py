"""What every rollout engine offers. Token ids in, token ids out: no tokenizer is involved.

An engine belongs to one data-parallel shard of its node; methods are local to the shard's ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from siirl.data.chosen_experts import longer
from siirl.data.seen import NO_IMAGES, Seen
from siirl.errors import ConfigError, EpisodeFailed, NotSupportedError, RolloutError
from siirl.observe.metrics import Metrics


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; ConfigError for values that cannot be sampled with."""

    max_tokens: int
    """Most tokens of a response."""
    n: int = 1
    """Responses of each prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """Most likely tokens that are drawn from; -1: all."""
    top_p: float = 1.0
    """Probability of the most likely tokens that are drawn from; 1.0: all."""
    stop_token_ids: tuple[int, ...] = ()
    """Each ends a response and stays in it."""
    ignore_eos: bool = False
    """Never stop early."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value}: must be {bound}"
            for name, value, bound, holds in (
                ("max_tokens", self.max_tokens, "at least 1", self.max_tokens >= 1),
                ("n", self.n, "at least 1", self.n >= 1),
                (
                    "temperature",
                    self.temperature,
                    "0 (greedy) or above",
                    0 <= self.temperature < float("inf"),
                ),
                ("top_k", self.top_k, "at least 1, or -1 for no limit", self.top_k >= -1),
                ("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1),
            )
            if not holds
        ]
        if wrong:
            raise ConfigError(f"sampling parameters out of range: {'; '.join(wrong)}.")


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    token_ids: list[int]
    log_probs: list[float]
    """Of each sampled token, in nats, under the distribution at the sampling temperature, before top-k/top-p
    (what the trainer computes at that temperature; for greedy decoding: at temperature 1)."""
    finish_reason: str
    """ "stop" (a stop token was sampled) or "length"; "paused" for what `pause` cut off."""
    weight_version: int
    """Of the weights that sampled it, the oldest if there were several."""

    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each token, where they were not the same for all."""
    experts: bytes | None = None
    """Of each token of prompt and response but the last, which nothing read: what it was computed by, layer
    by layer, int16. None where actor.router_replay does not ask for it."""

    @property
    def token_versions(self) -> list[int]:
        """Of the weights that sampled each token."""
        return self.versions or [self.weight_version] * len(self.token_ids)


Key = int | str


@dataclass(frozen=True)
class Request:
    """One response that is wanted of a stream, or the rest of one.

    Its completion is sample number `sample` of `generate([prompt], params, [seed])`; params.n is 1 (else
    RolloutError).
    """

    key: Key
    """The asker's name for it, unique among those unanswered."""
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    """Of the prompt: all its samples have the same."""
    sample: int = 0
    """Its number among the samples of the prompt."""
    start: int = 0
    """Tokens at the end of the prompt that were sampled for this response before it was paused. What follows
    draws the numbers that it would have drawn."""
    kv_version: int | None = None
    """Of the weights that sampled the first of those tokens; None: there is none. An engine that keeps keys
    and values (rollout.keep_kv) looks among those of requests that began under the same weights."""
    seen: Seen = NO_IMAGES
    """The images among its tokens."""

    def __post_init__(self) -> None:
        if self.params.n != 1:
            raise RolloutError(
                f"request {self.key!r} asks for n={self.params.n} responses: a request of a stream has one. "
                "Submit a request, with a seed of its own, for each."
            )


class RolloutStream(ABC):
    """Requests to one engine, each answered as soon as it is complete, while others join and run.

    Used by one thread at a time, on the first rank of the engine's shard; no communication with other ranks.
    After an error only `close` is of use.
    """

    runs_in_background: bool = False
    """See RolloutEngine.stream."""

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

        What is pending stays so. Called by the engine. Nothing to do where nothing runs outside `collect`.
        """
        return None

    def go_on(self) -> None:
        """Let what was held run again, each response from its tokens on."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Forget what is pending; the engine can be used otherwise again. Idempotent."""


Interrupt = Callable[[Sequence[Key]], bool]

WeightPart = Literal["merged", "adapter", "base_and_adapter"]
"""Weights as a model directory has them; or an adapter for a base that is there, or is sent along."""


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
    def takes(self) -> WeightPart:
        """What the next `load_weights` must bring; the same on all ranks of the model."""
        return "merged"

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """n completions of each prompt, in order. seeds: one 64-bit int per prompt.

        The result for a prompt depends on (weights, prompt, params, its seed) alone: not on the other
        prompts of the call nor their order, up to float rounding. Zero prompts give an empty list.
        """

    def generate_seeing(
        self,
        prompts: Sequence[Sequence[int]],
        seen: Sequence[Seen],
        params: SamplingParams,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """As `generate`, of prompts with images among their tokens; maybe none.

        NotSupportedError for an engine that takes none.
        """
        raise NotSupportedError(
            f"not supported yet: rollout engine {self.name!r} with images in prompts. Use "
            "rollout.name=hf or vllm."
        )

    def score(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], top_k: int
    ) -> list[tuple[Tensor, Tensor]]:
        """What the model says at temperature 1 of the tokens of each row from a start, above 0, on.

        (token ids, log-probs) of each row, int64 and float32 [T, 1 + top_k]: of the token that is there, then
        of the top_k likeliest, the likeliest first. NotSupportedError for an engine that cannot.
        """
        raise NotSupportedError(f"not supported yet: rollout engine {self.name!r} as a teacher")

    def run_wave(
        self, requests: Sequence[Request], interrupt: Callable[[list[int]], bool] | None
    ) -> list[Completion]:
        """A completion of each request, which differ in max_tokens at most: what a WaveStream asks.

        interrupt: is told the positions of requests that have completed since it was asked last; true: the
        others end as they are, with finish_reason "paused". By default a call of `generate`, which cannot be
        interrupted; NotSupportedError for requests that it cannot answer.
        """
        params = requests[0].params
        if any((r.sample, r.start, r.params, *r.seen.images) != (0, 0, params) for r in requests):
            raise NotSupportedError(
                f"not supported yet: rollout engine {self.name!r}: parts of responses, or images in a stream"
            )
        prompts, seeds = [request.prompt for request in requests], [request.seed for request in requests]
        return [completion for (completion,) in self.generate(prompts, params, seeds)]

    def stream(self, interrupt: Interrupt | None = None, runs_in_background: bool = False) -> RolloutStream:
        """A new stream of requests; the one before is closed. On the first rank of a shard.

        interrupt: whether `collect` shall come back, after requests with these keys have completed, maybe
        none; asked now and again by engines that work inside `collect`, which else come back when all are
        complete.
        runs_in_background: while its requests are pending, the engine may take weights, under which they go
        on (what they have so far is read again, unless rollout.keep_kv), and may answer `generate`.
        """
        if self._stream is not None:
            self._stream.close()
        self._stream = self.new_stream(interrupt)
        self._stream.runs_in_background = runs_in_background
        return self._stream

    def new_stream(self, interrupt: Interrupt | None) -> RolloutStream:
        """The engine's kind of stream; by default waves: one call for all that has come since."""
        return WaveStream(self, interrupt)

    def share(self, value: Any) -> Any:
        """What the first rank of the shard gives, on all its ranks; a JSON value. Collective over them."""
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


MOST_NAMED = 8
"""Requests whose keys an error names."""


@dataclass
class Unfinished:
    """A request of a stream, and its response so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: bytes | None = None

    def extend(self, part: Completion) -> None:
        """Add what was sampled of it."""
        self.experts = longer(self.experts, part.experts)
        self.token_ids += part.token_ids
        self.log_probs += part.log_probs
        self.versions += part.token_versions

    def rest(self) -> Request:
        """What is still wanted."""
        done = len(self.token_ids)
        if not done:
            return self.request
        return replace(
            self.request,
            prompt=[*self.request.prompt, *self.token_ids],
            params=replace(self.request.params, max_tokens=self.request.params.max_tokens - done),
            start=self.request.start + done,
            kv_version=self.versions[0] if self.request.kv_version is None else self.request.kv_version,
        )

    def so_far(self, reason: str, version: int) -> Completion:
        """What there is of it. version: of the engine's weights, where no token says more."""
        oldest = min(self.versions, default=version)
        mixed = self.versions if len(set(self.versions)) > 1 else []
        return Completion(self.token_ids, self.log_probs, reason, oldest, mixed, self.experts)


class WaveStream(RolloutStream):
    """A stream over `run_wave`: what has come in runs as one call, a wave, which `collect` waits for.

    What an interrupted wave leaves runs in the next one, as the end of its prompt.
    """

    def __init__(self, engine: RolloutEngine, interrupt: Interrupt | None = None) -> None:
        """See RolloutEngine.stream."""
        self._engine, self._interrupt = engine, interrupt
        self._waiting: dict[Key, Unfinished] = {}
        self._refused: dict[Key, EpisodeFailed] = {}

    @property
    def num_pending(self) -> int:
        return len(self._waiting) + len(self._refused)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream."""
        refused = self._engine.check_requests(requests, [*self._waiting, *self._refused])
        self._refused |= refused
        self._waiting |= {r.key: Unfinished(r) for r in requests if r.key not in refused}

    def collect(self, timeout_s: float) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream; takes as long as the wave, whatever timeout_s."""
        answers: list[tuple[Key, Completion | EpisodeFailed]] = list(self._refused.items())
        waiting, self._waiting, self._refused = self._waiting, {}, {}
        unfinished: dict[Key, Unfinished] = {}
        by_params: dict[SamplingParams, list[Request]] = {}
        for one in waiting.values():
            by_params.setdefault(replace(one.request.params, max_tokens=1), []).append(one.rest())
        for requests in by_params.values():
            for request, part in zip(requests, self._run(requests), strict=True):
                one = waiting[request.key]
                one.extend(part)
                if part.finish_reason == "paused":
                    unfinished[request.key] = one
                else:
                    answers.append((request.key, one.so_far(part.finish_reason, part.weight_version)))
        self._waiting = unfinished
        return answers

    def _run(self, requests: list[Request]) -> list[Completion]:
        """Answers of one wave; an engine's errors count prompts: say whose they are."""
        keys, asked = [request.key for request in requests], self._interrupt
        interrupt = None if asked is None else lambda ended: asked([keys[position] for position in ended])
        try:
            return self._engine.run_wave(requests, interrupt)
        except RolloutError as error:
            named = ", ".join(map(repr, keys[:MOST_NAMED]))
            more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
            raise RolloutError(f"{error} Prompts 0, 1, ... are those of requests {named}{more}.") from error

    def pause(self, keys: Collection[Key] | None = None) -> list[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream."""
        answers: list[tuple[Key, Completion | EpisodeFailed]] = list(self._refused.items())
        version, self._refused = self._engine.weight_version, {}
        for key in [key for key in self._waiting if keys is None or key in keys]:
            answers.append((key, self._waiting.pop(key).so_far("paused", version)))
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
