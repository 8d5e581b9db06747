"""A rollout engine in a process of its own: what is the same whose engine it is."""

import dataclasses
import logging
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.data.completions import Key, Request, SamplingParams
from siirl.engines.rollout.base import Interrupt, RolloutEngine, TensorShare, WeightPart
from siirl.engines.rollout.call_limits import (
    CallLimits,
    WeightState,
    max_model_len,
)
from siirl.engines.rollout.served.engine_process import EngineProcess
from siirl.engines.rollout.served.engine_shard import EngineShard, engine_shard, physical_gpu
from siirl.engines.rollout.served.journal import Sleep, Told, Wake
from siirl.engines.rollout.served.lora_adapters import LoadAdapter, SharedEngine, base_alone
from siirl.engines.rollout.served.messages import Answer, Score, Start
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.engines.rollout.served.stream import EngineStream, StreamRouter
from siirl.engines.train.adapters.lora import adapter_name
from siirl.engines.weights.bucket import LiveWeights
from siirl.engines.weights.engine_loader import EngineWeights
from siirl.engines.weights.target import WeightSpecs, checked_weights, weights_of_directory
from siirl.errors import EpisodeFailed, RolloutError, WeightSyncError
from siirl.model_files.hf_config import engine_overrides, load_hf_config
from siirl.observe.metrics import Metrics
from siirl.observe.spans import phase
from siirl.parallel.process_groups import ProcessGroupManager

ONE_TOKEN = SamplingParams(max_tokens=1)
"""What vLLM samples after a row that it scores."""


def checked_scores(
    scored: Iterable[tuple[bytes, bytes]],
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    top_k: int,
    engine: str,
    dtype: str,
) -> list[tuple[Tensor, Tensor]]:
    """Tokens and log-probs of each row, [T, 1 + K], of what the engine's process sent (RowScores).

    RolloutError unless each row's own tokens were scored, by numbers.
    """
    found = []
    for index, (row, start, (token_ids, log_probs)) in enumerate(zip(rows, starts, scored, strict=True)):
        shape = (-1, 1 + top_k)
        ids_TK = torch.frombuffer(bytearray(token_ids), dtype=torch.int32).to(torch.int64).view(shape)
        log_prob_TK = torch.frombuffer(bytearray(log_probs), dtype=torch.float32).view(shape)
        if ids_TK[:, 0].tolist() != list(row[start:]):
            raise RolloutError(f"rollout engine {engine!r} scored other tokens than those of row {index}.")
        if not bool(log_prob_TK.isfinite().all()):
            raise RolloutError(
                f"row {index} has log-probs by {engine!r} that are not finite: its weights overflow in "
                f"{dtype}, or hold NaN. Set actor_rollout_ref.rollout.dtype=float32 at its node, or give "
                "another model."
            )
        found.append((ids_TK, log_prob_TK))
    return found


log = logging.getLogger(__name__)


class ServedRollout(RolloutEngine):
    """Samples with an engine on the GPUs of a shard's ranks, or on the CPU, which a subclass starts.

    With tensor parallelism the first rank of a shard owns the engine's process; its peers hand over their
    copy of the weights, and get the results. Weights come by `load_weights` alone. On a GPU `sleep` gives
    back the memory of the weights and of the KV cache; the next sync brings the weights again.
    """

    backend: ClassVar[str]
    """Its rollout.name."""
    title: ClassVar[str]
    """What people call it."""
    native: ClassVar[str]
    """Module of its process, whose NativeEngine knows the engine's interfaces."""
    counters: ClassVar[tuple[tuple[str, str], ...]] = ()
    """What the engine counts, by its own names, and our names of that."""

    def __init__(
        self,
        plan: ModelPlan,
        cfg: Config,
        groups: ProcessGroupManager | None,
        device: torch.device | str,
        base: "ServedRollout | None" = None,
    ) -> None:
        """Start the engine, which takes about a minute on a GPU. Collective over the ranks of the shard.

        base: whose engine this one uses instead, with an adapter of its own.
        ConfigError: it is missing, of another version, or refuses the configuration; RolloutError: it died.
        """
        self.check_here(plan, cfg, torch.device(device))
        self.name = plan.name
        self.weight_version = -1
        self._device = torch.device(device)
        self._dtype = cfg.actor_rollout_ref.rollout.dtype
        self._state: WeightState = "empty"
        self._metrics = Metrics()
        self._counting = threading.Lock()  # a thread of an interaction's stream counts
        self._adapter = plan.name if plan.base else None
        self._engine = (
            base._engine if base else SharedEngine(keeps_weights=plan.base is not None or plan.is_teacher)
        )
        self._engine.users.append(self)
        self._shard = engine_shard(plan, groups)
        model = cfg.actor_rollout_ref.model
        hf_config = load_hf_config(model)
        self._cfg = _with_whole_overrides(cfg, hf_config)
        self._specs, self._aliases = weights_of_directory(hf_config, cfg, plan.base is not None)
        self._limits = CallLimits(
            plan.name, hf_config.get_text_config().vocab_size, max_model_len(cfg, hf_config)
        )
        self._gives_memory_back = (
            self._device.type == "cuda" and cfg.actor_rollout_ref.rollout.free_cache_engine
        )
        self._process: RecoveringEngine | None = base._process if base else None
        self._router: StreamRouter | None = base._router if base else None
        alone = len(self._shard.ranks) == 1
        self._restarts = cfg.actor_rollout_ref.rollout.max_engine_restarts if alone else 0
        self._weights: EngineWeights = base._weights if base else self.new_weights(plan)
        if base is None:
            self._start(plan, hf_config, groups)
            self.sleep()

    @abstractmethod
    def check_here(self, plan: ModelPlan, cfg: Config, device: torch.device) -> None:
        """ConfigError if the engine is not installed, or in a version that siirl does not work with.

        NotSupportedError for what it does not do on this device.
        """

    @abstractmethod
    def engine_arguments(self, plan: ModelPlan, hf_config: Any, num_ranks: int) -> dict[str, Any]:
        """What the engine is started with. num_ranks: that share it."""

    @abstractmethod
    def engine_environment(self, num_ranks: int, gpus: list[str]) -> dict[str, str]:
        """Environment of its process, on top of the worker's. gpus: that it may see."""

    def new_weights(self, plan: ModelPlan) -> EngineWeights:
        """How its process gets weights: by the loaders of its models."""
        return EngineWeights(*self.weight_parts)

    @property
    def weight_parts(self) -> tuple[str, WeightSpecs, torch.device, bool, EngineShard]:
        """What EngineWeights are made from."""
        return self.name, self._specs, self._device, self._restarts > 0, self._shard

    def _start(self, plan: ModelPlan, hf_config: Any, groups: ProcessGroupManager | None) -> None:
        """Start the process, on the first rank of the shard; the others wait."""
        cfg = self._cfg
        gpus = self._shard.gather(physical_gpu(self._device))
        if self._shard.is_first:
            rank = groups.rank if groups else 0
            logs = Path(cfg.trainer.output_dir).expanduser().absolute() / "logs"
            log_path = logs / f"{self.backend}_{plan.name}_rank_{rank}.log"
            log.info("starting %s for %s; its output is in %s", self.title, plan.name, log_path)
            num_ranks = len(self._shard.ranks)
            environment = self.engine_environment(num_ranks, gpus)
            arguments = self.engine_arguments(plan, hf_config, num_ranks)
            why_none = "An engine of several ranks is not started again." if num_ranks > 1 else ""
            start = Start(self.native, arguments)
            with phase(f"start_{self.backend}"):
                self._process = RecoveringEngine(
                    lambda: EngineProcess(plan.name, environment, log_path, cfg.trainer.deadline_s),
                    start,
                    log_path,
                    self._restarts,
                    why_none,
                )
            self._router = StreamRouter(self._process)
        self._shard.meet()

    @contextmanager
    def alone(self, num_requests: int) -> Iterator[None]:
        """See RolloutEngine: the streams of all its users are held, or idle."""
        self._check_all_idle("generate")
        with self.streams_held(), phase("generate", rows=num_requests):
            yield

    def score(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], top_k: int
    ) -> list[tuple[Tensor, Tensor]]:
        """See RolloutEngine. Collective over the ranks of the shard. Errors as of generate."""
        self._check_all_idle("score")
        self._limits.check_weights(self._state)
        for index, row in enumerate(rows):
            self._limits.check_prompt(f"row {index}", row, ONE_TOKEN)
        if not rows:
            return []
        scored = self._shard.share(self._score(rows, starts, top_k) if self._shard.is_first else None)
        return checked_scores(scored, rows, starts, top_k, self.name, self._dtype)

    def _score(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], top_k: int
    ) -> list[tuple[bytes, bytes]]:
        self._wake_cache()
        assert self._process is not None
        with phase("score", rows=len(rows)):
            answer = self._process.ask(Score(rows, list(starts), top_k))
        return [(row.token_ids, row.log_probs) for row in answer.rows]

    def new_stream(self, interrupt: Interrupt | None) -> EngineStream:
        """See RolloutEngine: the engine's process admits requests between two of its steps."""
        if self._router is None:
            raise RolloutError(
                f"rollout engine {self.name!r}: rank {self._shard.ranks[0]}, the first of its shard, "
                "has its stream"
            )
        return EngineStream(self, self._router, self._dtype, self._adapter)

    def check_requests(self, requests: Sequence[Request], pending: Iterable[Key]) -> dict[Key, EpisodeFailed]:
        """Which requests of a stream cannot run, and why, see CallLimits; wakes the KV cache."""
        refused = self._limits.check_requests(self._state, requests, pending)
        if self.leads:
            self._wake_cache()
        return refused

    def count(
        self, answers: Sequence[Answer], prompt_tokens: int, stats: dict[str, float], reread: int = 0
    ) -> None:
        """Keep what the engine says for drain_metrics. prompt_tokens: of the requests, as submitted.

        reread: those of them that had been read before a response was paused, and were not in the cache.
        """
        cached = float(sum(answer.num_cached_tokens for answer in answers))
        with self._counting:
            self._metrics.mean("rollout/prefix_cache_hits", cached, prompt_tokens)
            if self._cfg.actor_rollout_ref.rollout.max_lag:
                self._metrics.sum("rollout/reread_tokens", reread)
            for name, metric in self.counters:
                if name in stats:
                    self._metrics.max(metric, stats[name])

    @property
    def leads(self) -> bool:
        """See RolloutEngine."""
        return self._shard.is_first

    @property
    def takes(self) -> WeightPart:
        """See RolloutEngine."""
        if self._adapter is None:
            return "merged"
        return "adapter" if self._engine.loaded else "base_and_adapter"

    @property
    def reads_live(self) -> bool:
        """See WeightTarget."""
        return self._weights.reads_live

    @property
    def keeps(self) -> TensorShare:
        """See RolloutEngine."""
        return "all" if len(self._shard.ranks) == 1 else "unknown"

    def weight_specs(self) -> WeightSpecs:
        """See RolloutEngine."""
        if self.takes != "adapter":
            return self._specs
        return {name: spec for name, spec in self._specs.items() if adapter_name(name)}

    def expect_weights(self) -> None:
        """See RolloutEngine; no request of a stream runs until the weights are there. Collective as that."""
        self._check_all_idle("take weights")
        self._hold_streams()
        self.wake()
        if self.takes != "adapter":
            self._weights.expect(self._process)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine; wakes the weights. Collective over the ranks of the shard."""
        self._check_all_idle("take weights")
        with self.streams_held():
            self._load_weights(weights, version)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.wake()
        self._state, self.weight_version = "loading", -1
        checked = checked_weights(weights, self.weight_specs(), self._aliases, self.name)
        adapter: dict[str, Tensor] = {}
        base = base_alone(checked, self._specs, adapter)
        try:
            if self.takes == "adapter":
                for _ in base:
                    pass
            else:
                live = weights if isinstance(weights, LiveWeights) else None
                self._load_base(base, live)
            if self._adapter is not None:
                number = self._engine.users.index(self) + 1
                event = LoadAdapter(self._adapter, number, adapter, self._cfg)
                with phase("load_adapter", tensors=len(adapter)):
                    self._weights.together(self._process, lambda process: process.tell(event))
        except RolloutError as error:
            raise WeightSyncError(str(error)) from error
        self._state, self.weight_version = "ready", version

    def _load_base(self, weights: Iterator[tuple[str, Tensor]], live: LiveWeights | None) -> None:
        """Replace all weights but adapters, which the engine then has none of.

        live: see EngineWeights.replace.
        """
        for user in self._engine.users:
            user.lose_weights()
        self._state, self._engine.loaded = "loading", False
        self._weights.replace(self._process, weights, live)
        self._engine.loaded = True

    def lose_weights(self) -> None:
        """See Policy."""
        self._state, self.weight_version = "empty", -1

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache, on a GPU with free_cache_engine. Idempotent.

        A base with adapters moves to host memory, and is as it was after `wake`.
        """
        self._check_all_idle("sleep", even_giving_way=True)
        engine = self._engine
        if not self._gives_memory_back or engine.weights_sleep:
            return
        with phase("sleep"):
            self._tell(Sleep(engine.keeps_weights))
        engine.weights_sleep = engine.cache_sleeps = True
        if not engine.keeps_weights:
            self._state, self.weight_version = "sleeping", -1

    def wake(self) -> None:
        """Take memory for the weights again, without values; the KV cache wakes to generate. Idempotent."""
        if self._engine.weights_sleep:
            with phase("wake"):
                torch.cuda.empty_cache()  # what this worker has cached is not the engine's to take
                self._tell(Wake("weights"))
            self._engine.weights_sleep = False
            self._state = "empty" if self._state == "sleeping" else self._state

    def close(self) -> None:
        """End the engine's process, for all its users."""
        self._stream = None
        self._state, self.weight_version = "empty", -1
        if self._process is not None:
            self._process.close()
        self._weights.close()

    def drain_metrics(self) -> Metrics:
        """What the engine counted since the last call."""
        with self._counting:
            metrics, self._metrics = self._metrics, Metrics()
        return metrics

    def drain_restarts(self) -> int | None:
        """See RolloutEngine; what several policies use counts for the one that is asked first."""
        return None if self._process is None else self._process.drain_restarts()

    def share(self, value: Any) -> Any:
        """See RolloutEngine."""
        return self._shard.share(value)

    def read_tensor(self, name: str) -> list[Tensor]:
        """A parameter under the engine's own name, of each of its workers; float32. Of the first rank."""
        assert self._process is not None
        parts = self._process.call("read_tensor", name=name)
        return [torch.tensor(values, dtype=torch.float32).view(shape) for values, shape in parts]

    def _wake_cache(self) -> None:
        if self._engine.keeps_weights:
            self.wake()
        if self._engine.cache_sleeps:
            with phase("wake"):
                torch.cuda.empty_cache()
                self._tell(Wake("kv_cache"))
            self._engine.cache_sleeps = False
        self._weights.go_on_keeping()

    def _check_all_idle(self, what: str, even_giving_way: bool = False) -> None:
        """RolloutError if a stream of this engine has pending requests, whoever's it is."""
        for user in self._engine.users:
            user.check_idle(what, even_giving_way)

    def _hold_streams(self) -> None:
        for user in self._engine.users:
            user.hold_stream()

    @contextmanager
    def streams_held(self) -> Iterator[None]:
        """See RolloutEngine: the streams of all its users."""
        self._hold_streams()
        yield
        for user in self._engine.users:
            user.stream_goes_on()

    def _tell(self, event: Told) -> None:
        """Have the engine do something that has no result; the first rank of the shard does."""
        if self._process is not None:
            self._process.tell(event)


def _with_whole_overrides(cfg: Config, hf_config: Any) -> Config:
    """The configuration from which the engine's arguments are made: engines set values one by one."""
    policy = cfg.actor_rollout_ref
    whole = engine_overrides(policy.model, hf_config)
    model = dataclasses.replace(policy.model, override_config=whole)
    return dataclasses.replace(cfg, actor_rollout_ref=dataclasses.replace(policy, model=model))
