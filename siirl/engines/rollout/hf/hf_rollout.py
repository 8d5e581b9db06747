"""The rollout engine on transformers' own models: no further dependency, on CPU and GPU."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.config.common import ModelConfig
from siirl.data.completions import PAUSED, Completion, Key, Request, SamplingParams
from siirl.data.image_reader import ImageReader
from siirl.data.seen import Seen
from siirl.engines.rollout.base import Interrupt, RolloutEngine, WaveStream, WeightPart
from siirl.engines.rollout.call_limits import CallLimits, WeightState, check_finite
from siirl.engines.rollout.hf.decode import Samples, decode, use_decode_attention
from siirl.engines.rollout.hf.prefill import Prompt, PromptReader
from siirl.engines.rollout.sampling import derive_seed, later_seed
from siirl.engines.train.adapters.frozen_base import use_base
from siirl.engines.train.adapters.lora import adapter_name, add_lora
from siirl.engines.train.attention.state_layers import pin_state_layers
from siirl.engines.train.experts.router_replay import RouterReplay
from siirl.engines.train.hf_model import attentions, keep_float32, model_class
from siirl.engines.train.vision.tower import prepare_tower
from siirl.engines.weights.target import (
    SharedBase,
    WeightSpecs,
    checked_weights,
    stored_tensors_of,
    tensor_names,
)
from siirl.errors import ConfigError, EpisodeFailed, NotSupportedError
from siirl.model_files.hf_config import load_hf_config
from siirl.models.families import family_of
from siirl.models.sizes import STATES, head_size, num_heads, state_layers, state_numbers
from siirl.models.trained import PACKED_LAYERS
from siirl.parallel.process_groups import ProcessGroupManager

CACHED_LAYERS = PACKED_LAYERS | {STATES}
"""Layer types whose state is keys and values of each position, or one of a size: what can be repeated."""


class _Row(NamedTuple):
    """One response to decode."""

    prompt: tuple[int, ...]
    seed: int
    limit: int
    """Most tokens."""
    seen: Seen
    """Of the prompt."""

    @property
    def asked(self) -> Prompt:
        """What the model reads for it."""
        return Prompt(self.prompt, self.seen)


class HFRollout(RolloutEngine):
    """Samples with a transformers model on one device; weights arrive by `load_weights` alone."""

    def __init__(
        self,
        plan: ModelPlan,
        cfg: Config,
        groups: ProcessGroupManager,
        device: torch.device | str,
        base: "HFRollout | None" = None,
    ) -> None:
        """Build the architecture of actor_rollout_ref.model, without reading weights. No communication.

        base: the engine whose base this one's adapter is for; it has the same tensors in a module tree of its
        own, so both may run at once.
        """
        self.name = plan.name
        self.weight_version = -1
        self._rollout = cfg.actor_rollout_ref.rollout
        if self._rollout.tensor_model_parallel_size != 1:
            raise ConfigError(
                "actor_rollout_ref.rollout.tensor_model_parallel_size="
                f"{self._rollout.tensor_model_parallel_size}: rollout 'hf' runs on one device. Set it to 1."
            )
        self._device = torch.device(device)
        model_cfg = cfg.actor_rollout_ref.model
        self._model = build_model(
            model_cfg, self._rollout.dtype, self._device if base is None else torch.device("meta")
        )
        self._shared: SharedBase | None = None
        if plan.base is not None:
            self._shared = SharedBase() if base is None else base._shared
            add_lora(self._model, model_cfg, cfg.trainer.seed)
            self._model.requires_grad_(False)
        if base is not None:
            use_base(self._model, base._model, self._device)
        sees = family_of(self._model.config.model_type).sees_images
        self._images = ImageReader.from_config(cfg) if sees else None
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        max_context = min(n for n in (positions, self._rollout.max_model_len, 1 << 62) if n)
        vocab = self._model.get_input_embeddings().num_embeddings
        replays = cfg.actor_rollout_ref.actor.router_replay.mode == "R3"
        self._replay = RouterReplay.of_model(self._model) if replays else None
        self._limits = CallLimits(plan.name, vocab, max_context)
        self._specs, self._aliases = tensor_names(self._model)
        self._state: WeightState = "empty"

    def new_stream(self, interrupt: Interrupt | None) -> WaveStream:
        """See RolloutEngine: what has come in is decoded together, whose prompts are read anew."""
        return WaveStream(self, self._sample, interrupt)

    def _sample(self, requests: Sequence[Request], interrupt: Interrupt | None) -> list[Completion]:
        """See SampleWave; wakes the engine. RolloutError for log-probs that are not finite."""
        self.wake()
        rows = [
            _Row(
                tuple(r.prompt),
                later_seed(derive_seed(r.seed, r.sample), r.start),
                r.params.max_tokens,
                r.seen,
            )
            for r in requests
        ]
        # Equal prompts together, and similar lengths.
        order = sorted(range(len(rows)), key=lambda row: (len(rows[row].prompt), *rows[row].asked))
        params = replace(requests[0].params, max_tokens=max(row.limit for row in rows))
        num_samples = 1 + max(request.sample for request in requests)
        max_rows = self._rows_per_pass(num_samples, len(rows[order[-1]].prompt) + params.max_tokens)
        found = [Completion([], [], PAUSED, self.weight_version) for _ in rows]
        interrupted = False

        def told(part: Sequence[int], ended: list[int]) -> bool:
            nonlocal interrupted
            interrupted = interrupt is not None and interrupt([requests[part[row]].key for row in ended])
            return interrupted

        with torch.inference_mode():
            for start, stop in _passes(len(rows), max_rows):
                part = order[start:stop]
                samples = self._decode([rows[row] for row in part], params, partial(told, part))
                limits = [rows[row].limit for row in part]
                for row, completion in zip(part, self._completions(samples, limits), strict=True):
                    found[row] = completion
                if interrupted:
                    break
        named = ((f"request {request.key!r}", one) for request, one in zip(requests, found, strict=True))
        check_finite(named, str(self._model.dtype))
        return found

    def check_requests(self, requests: Sequence[Request], pending: Iterable[Key]) -> dict[Key, EpisodeFailed]:
        """See RolloutEngine and CallLimits."""
        return self._limits.check_requests(self._state, requests, pending)

    @property
    def takes(self) -> WeightPart:
        """See RolloutEngine."""
        if self._shared is None:
            return "merged"
        return "adapter" if self._shared.loaded else "base_and_adapter"

    def weight_specs(self) -> WeightSpecs:
        """See RolloutEngine."""
        return {
            name: spec
            for name, spec in self._specs.items()
            if self.takes != "adapter" or adapter_name(name) is not None
        }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine; wakes the engine."""
        self.check_idle("take weights")
        with self.streams_held():
            self._load_weights(weights, version)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.wake()
        self._state, self.weight_version = "loading", -1
        own = stored_tensors_of(self._model)
        with torch.no_grad():
            for name, tensor in checked_weights(weights, self.weight_specs(), self._aliases, self.name):
                own[name].copy_(tensor, non_blocking=True)
        self._state, self.weight_version = "ready", version
        if self._shared is not None:
            self._shared.loaded = True

    def sleep(self) -> None:
        """Move the weights to host memory, on a GPU and with rollout.free_cache_engine. Idempotent."""
        self.check_idle("sleep", even_giving_way=True)
        if self._device.type != "cpu" and self._rollout.free_cache_engine:
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the weights back to the device. Idempotent."""
        self._model.to(self._device)

    def close(self) -> None:
        """Release the model."""
        self._state, self.weight_version = "empty", -1
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        del self._model

    def _decode(
        self, rows: Sequence["_Row"], params: SamplingParams, interrupt: Callable[[list[int]], bool]
    ) -> Samples:
        # in the order of the rows, equal ones together
        prompts = Counter(row.asked for row in rows)
        return decode(
            self._model,
            PromptReader(self._model, self._images, self._rollout.max_num_batched_tokens, self._replay),
            list(prompts),
            list(prompts.values()),
            [row.seed for row in rows],
            params,
            [row.limit for row in rows],
            interrupt,
        )

    def _completions(self, samples: Samples, limits: Sequence[int]) -> list[Completion]:
        columns = (samples.token_BT, samples.log_prob_BT, samples.length_B, samples.stopped_B)
        experts = [one.numpy().tobytes() for one in samples.experts_B] or [None] * len(limits)
        return [
            Completion(
                ids[:length],
                log_probs[:length],
                "stop" if stopped else "length" if length == limit else PAUSED,
                self.weight_version,
                experts=chosen,
            )
            for ids, log_probs, length, stopped, limit, chosen in zip(
                *(column.tolist() for column in columns), limits, experts, strict=True
            )
        ]

    def _rows_per_pass(self, n: int, max_context: int) -> int:
        """Samples decoded together: the configured bounds, and on a GPU the memory for their cache."""
        rows = self._rollout.max_num_seqs
        if self._rollout.micro_batch_size is not None:
            rows = min(rows, self._rollout.micro_batch_size * n)
        if self._device.type == "cuda":
            rows = min(rows, self._cache_room() // _cache_bytes_per_row(self._model, max_context))
        return max(rows, 1)

    def _cache_room(self) -> int:
        """Bytes that the GPU has for keys, values and states now; engines with open streams share it."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return int(free_bytes * self._rollout.gpu_memory_utilization / self.num_open_streams)


def build_model(model_cfg: ModelConfig, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model of `model_cfg` on `device`, for inference, its weights uninitialised memory.

    dtype: "auto" (what config.json says, else float32), "float32", "bfloat16" or "float16". DataError
    without a config.json; NotSupportedError for layers that are not plain softmax attention.
    """
    config = load_hf_config(model_cfg)
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - CACHED_LAYERS
    if others:
        raise NotSupportedError(
            f"not supported yet: rollout 'hf' for layers of type {', '.join(sorted(others))} "
            f"({model_cfg.path}). Use a model of {' and '.join(sorted(CACHED_LAYERS))} layers."
        )
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    kernels = "eager" if capped or family_of(config.model_type).sinks else "sdpa"
    torch_dtype = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device(device), no_init_weights():
        try:
            model = model_class(config, "lm").from_config(
                config,
                dtype=torch_dtype,
                attn_implementation=attentions(config, kernels),
                trust_remote_code=model_cfg.trust_remote_code,
            )
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            raise _unplain(model_cfg, str(error)) from error
    prepare_tower(model)
    use_decode_attention(model)
    pin_state_layers(model)
    keep_float32(model)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _unplain(model_cfg: ModelConfig, what: str) -> NotSupportedError:
    return NotSupportedError(
        f"not supported yet: rollout 'hf' for {model_cfg.path}, a model without plain softmax attention: "
        f"{what}. Use rollout.name=vllm, or another model."
    )


def _cache_bytes_per_row(model: PreTrainedModel, num_tokens: int) -> int:
    """Keys and values of a row of so many tokens, and its states in layers that have some."""
    raw = model.config.get_text_config().to_dict()
    heads, layers = raw.get("num_key_value_heads") or num_heads(raw), model.config.get_text_config()
    with_states = state_layers(raw) if family_of(raw["model_type"]).has_states else 0
    states = with_states * state_numbers(raw) * torch.float32.itemsize if with_states else 0
    attending = layers.num_hidden_layers - with_states
    return 2 * attending * heads * head_size(raw) * num_tokens * model.dtype.itemsize + states


def _passes(num_rows: int, max_rows: int) -> list[tuple[int, int]]:
    """[start, stop) of passes of equal size, give or take one row, none above max_rows."""
    count = -(-num_rows // max_rows)
    return [(num_rows * index // count, num_rows * (index + 1) // count) for index in range(count)]
