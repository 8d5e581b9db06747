"""The rollout engine on vLLM, in a process of its own: one code path for GPU and CPU."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from siirl.config import Config
from siirl.dag.plan import ModelPlan
from siirl.data.model_files import model_dir
from siirl.engines.rollout.base import Completion, Key, Request, RolloutEngine, SamplingParams
from siirl.engines.rollout.checks import CallLimits, WeightState, check_complete_responses, check_finite
from siirl.engines.rollout.sampling import derive_seed
from siirl.engines.rollout.shared_buffer import SharedBuffer
from siirl.engines.rollout.vllm_arguments import (
    engine_arguments,
    engine_environment,
    max_model_len,
    physical_gpu,
)
from siirl.engines.rollout.vllm_process import EngineProcess
from siirl.engines.rollout.vllm_stream import VLLMStream
from siirl.engines.rollout.vllm_version import vllm_version
from siirl.engines.rollout.weights import WeightSpecs, checked_weights, tensor_names
from siirl.engines.train.hf_model import load_hf_config
from siirl.errors import NotSupportedError, RolloutError, WeightSyncError
from siirl.observe.metrics import Metrics
from siirl.observe.spans import phase
from siirl.parallel.process_groups import ProcessGroups

BUCKET_BYTES = 256 << 20
"""Weights reach the engine through a buffer of this size, or of the largest tensor."""
ALIGN_BYTES = 16


class VLLMRollout(RolloutEngine):
    """Samples with a vLLM engine on the GPUs of a shard's ranks, or on the CPU.

    With tensor parallelism the first rank of a shard owns the engine's process; its peers hand over their
    copy of the weights, and get the results. Weights come by `load_weights` alone. On a GPU `sleep` gives
    back the memory of the weights and of the KV cache; the next sync brings the weights again.
    """

    def __init__(
        self, plan: ModelPlan, cfg: Config, groups: ProcessGroups | None, device: torch.device | str
    ) -> None:
        """Start the engine, which takes about a minute on a GPU. Collective over the ranks of the shard.

        ConfigError: vLLM is missing, of another version, or refuses the configuration; RolloutError: it died.
        """
        vllm_version()
        self.name = plan.name
        self.weight_version = -1
        self._device = torch.device(device)
        self._dtype = cfg.actor_rollout_ref.rollout.dtype
        self._state: WeightState = "empty"
        self._cache_sleeps = False
        self._metrics = Metrics()
        self._join_shard(plan, groups)
        model = cfg.actor_rollout_ref.model
        hf_config = load_hf_config(model)
        self._specs, self._aliases = _weight_names(hf_config, self._dtype, model.trust_remote_code)
        self._limits = CallLimits(
            plan.name, hf_config.get_text_config().vocab_size, max_model_len(cfg, hf_config)
        )
        self._gives_memory_back = (
            self._device.type == "cuda" and cfg.actor_rollout_ref.rollout.free_cache_engine
        )
        self._process: EngineProcess | None = None
        gpus = self._gather(physical_gpu(self._device))
        if self._leads:
            rank = groups.rank if groups else 0
            self._process = EngineProcess(
                plan.name,
                engine_environment(len(self._shard), self._device, gpus),
                Path(cfg.trainer.output_dir).expanduser() / "logs" / f"vllm_{plan.name}_rank_{rank}.log",
                cfg.trainer.deadline_s,
            )
            arguments = engine_arguments(
                cfg, str(model_dir(model.path)), hf_config, len(self._shard), self._device
            )
            with phase("start_vllm"):
                self._process.ask("start", arguments=arguments)
        self._meet()
        self.sleep()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See RolloutEngine. Each sample is a request of its own; a prompt is prefilled once.

        RolloutError before the first complete sync, for a prompt that cannot run, for log-probs that are not
        finite, and when the engine dies, hangs or fails.
        """
        self.check_idle("generate")
        self._limits.check(self._state, prompts, params, seeds)
        if not prompts:
            return []
        result = self._generate(prompts, params, seeds) if self._leads else None
        reasons, arrays = self._share(result)
        bounds = np.cumsum(arrays["lengths"])[:-1]
        tokens = [part.tolist() for part in np.split(arrays["tokens"], bounds)]
        log_probs = [part.tolist() for part in np.split(arrays["log_probs"], bounds)]
        samples = [
            Completion(ids, values, reason, self.weight_version)
            for ids, values, reason in zip(tokens, log_probs, reasons, strict=True)
        ]
        completions = [samples[start : start + params.n] for start in range(0, len(samples), params.n)]
        check_finite(
            (
                (f"sample {sample} of prompt {call}", completion)
                for call, row in enumerate(completions)
                for sample, completion in enumerate(row)
            ),
            self._dtype,
        )
        return completions

    def new_stream(self) -> VLLMStream:
        """See RolloutEngine: the engine's process admits requests between two of its steps."""
        if self._process is None:
            raise RolloutError(
                f"rollout engine {self.name!r}: rank {self._shard[0]}, the first of its shard, has its stream"
            )
        return VLLMStream(self, self._process, self._dtype)

    def check_requests(self, requests: Sequence[Request], pending: Iterable[Key]) -> None:
        """RolloutError unless these requests of a stream can run; wakes the KV cache for them."""
        self._limits.check_requests(self._state, requests, pending)
        self._wake_cache()

    def count(self, stats: dict[str, float], prompt_tokens: int) -> None:
        """Keep vLLM's statistics for drain_metrics; prompt_tokens: of the responses that they tell of."""
        self._metrics.mean("rollout/prefix_cache_hits", stats["cached_tokens"], prompt_tokens)
        for name, metric in (
            ("vllm:num_preemptions", "rollout/vllm_preemptions_total"),
            ("vllm:kv_cache_usage_perc", "rollout/vllm_kv_cache_usage"),
        ):
            if name in stats:
                self._metrics.max(metric, stats[name])

    def weight_specs(self) -> WeightSpecs:
        """See RolloutEngine."""
        return dict(self._specs)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine; wakes the weights. Collective over the ranks of the shard."""
        self.check_idle("take weights")
        self.wake()
        self._state, self.weight_version = "loading", -1
        checked = checked_weights(weights, self._specs, self._aliases, self.name)
        buffer = SharedBuffer(self._buffer_bytes(), self._device)
        try:
            with phase("begin"):
                self._tell("begin_update")
            try:
                places = self._gather(buffer.place)
                for bucket in self._buckets(checked, buffer):
                    with phase("load", tensors=len(bucket["names"])):
                        self._tell("update", bucket=bucket | {"size": buffer.size, "place": _joined(places)})
                        self._meet()
            finally:
                with phase("finish"):
                    self._tell("finish_update")
        except RolloutError as error:
            raise WeightSyncError(str(error)) from error
        finally:
            buffer.close()
        self._meet()
        self._state, self.weight_version = "ready", version

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache, on a GPU with free_cache_engine. Idempotent."""
        self.check_idle("sleep")
        if self._gives_memory_back and self._state != "asleep":
            with phase("sleep"):
                self._tell("sleep")
            self._state, self.weight_version, self._cache_sleeps = "asleep", -1, True

    def wake(self) -> None:
        """Take memory for the weights again, without values; the KV cache wakes to generate. Idempotent."""
        if self._state == "asleep":
            with phase("wake"):
                torch.cuda.empty_cache()  # what this worker has cached is not the engine's to take
                self._tell("wake", part="weights")
            self._state = "empty"

    def close(self) -> None:
        """End the engine's process."""
        self._stream = None
        self._state, self.weight_version = "empty", -1
        if self._process is not None:
            self._process.close()

    def drain_metrics(self) -> Metrics:
        """What vLLM counted since the last call."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    def read_tensor(self, name: str) -> list[Tensor]:
        """A parameter under vLLM's own name, of each of its workers; float32. For checks; first rank only."""
        assert self._process is not None
        _, arrays = self._process.ask("read_tensor", name=name)
        return [torch.from_numpy(array.copy()) for array in arrays.values()]

    def _generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[list[str], dict[str, np.ndarray]]:
        self._wake_cache()
        table = [[derive_seed(seed, sample) for sample in range(params.n)] for seed in seeds]
        arrays = {
            "prompts": np.array([token for prompt in prompts for token in prompt], np.int64),
            "prompt_lengths": np.array([len(prompt) for prompt in prompts], np.int64),
            "seeds": np.array(table, np.int64),
        }
        assert self._process is not None
        with phase("generate", rows=params.n * len(prompts)):
            values, results = self._process.ask("generate", arrays, params=dataclasses.asdict(params))
        check_complete_responses(values["finish_reasons"], self.name)
        self.count(values["stats"], params.n * sum(len(prompt) for prompt in prompts))
        return values["finish_reasons"], results

    def _wake_cache(self) -> None:
        if self._cache_sleeps:
            with phase("wake"):
                torch.cuda.empty_cache()
                self._tell("wake", part="kv_cache")
            self._cache_sleeps = False

    def _buckets(
        self, weights: Iterator[tuple[str, Tensor]], buffer: SharedBuffer
    ) -> Iterator[dict[str, Any]]:
        """Fill the buffer with as many tensors as fit, cast to the engine's types; describe each filling."""
        entries: list[tuple[str, torch.dtype, list[int], int]] = []
        filled = 0

        def described() -> dict[str, Any]:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return {
                "names": [name for name, _, _, _ in entries],
                "dtypes": [str(dtype).removeprefix("torch.") for _, dtype, _, _ in entries],
                "shapes": [shape for _, _, shape, _ in entries],
                "starts": [start for _, _, _, start in entries],
            }

        for name, tensor in weights:
            shape, dtype = self._specs[name]
            size = math.prod(shape) * dtype.itemsize
            if entries and filled + size > buffer.size:
                yield described()
                entries, filled = [], 0
            buffer.data[filled : filled + size].view(dtype).view(shape).copy_(tensor)
            entries.append((name, dtype, list(shape), filled))
            filled += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        if entries:
            yield described()

    def _buffer_bytes(self) -> int:
        sizes = [
            -(-math.prod(shape) * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
            for shape, dtype in self._specs.values()
        ]
        return max(max(sizes), min(sum(sizes), BUCKET_BYTES))

    def _tell(self, kind: str, **values: Any) -> None:
        """A request without a result; only the first rank of the shard sends it."""
        if self._process is not None:
            self._process.ask(kind, **values)

    def _join_shard(self, plan: ModelPlan, groups: ProcessGroups | None) -> None:
        """The ranks that share this engine, and whether this rank is their first."""
        self._shard: tuple[int, ...] = (plan.ranks[0],)
        self._group = None
        if plan.dims.tp > 1:
            if groups is None:
                raise NotSupportedError("not supported yet: tensor parallelism outside of a run")
            self._shard = next(
                ranks for ranks in plan.dims.mesh_groups(plan.ranks)["tp"] if groups.rank in ranks
            )
            self._group = groups.get(self._shard)
        self._leads = self._group is None or dist.get_rank(self._group) == 0

    def _meet(self) -> None:
        if self._group is not None:
            dist.all_reduce(torch.zeros(1), group=self._group)

    def _gather(self, mine: Any) -> list[Any]:
        """A JSON value of each rank of the shard."""
        if self._group is None:
            return [mine]
        parts: list[Any] = [None] * len(self._shard)
        dist.all_gather_object(parts, mine, group=self._group)
        return parts

    def _share(
        self, result: tuple[list[str], dict[str, np.ndarray]] | None
    ) -> tuple[list[str], dict[str, np.ndarray]]:
        """The first rank's result, on all ranks of the shard."""
        box = [result]
        if self._group is not None:
            dist.broadcast_object_list(box, src=self._shard[0], group=self._group)
        assert box[0] is not None
        return box[0]


def _joined(places: list[dict[str, Any]]) -> dict[str, Any]:
    """One place for the workers of an engine: the first rank's file, or the handles of all GPUs."""
    if "path" in places[0]:
        return places[0]
    return {"handles": {uuid: handle for place in places for uuid, handle in place["handles"].items()}}


def _weight_names(hf_config: Any, dtype: str, trust_remote_code: bool) -> tuple[WeightSpecs, dict[str, str]]:
    """Names, shapes and types of the model's tensors, as a Hugging Face directory has them."""
    torch_dtype = (hf_config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch_dtype, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    return tensor_names(model)
