"""The rollout engine on SGLang."""

import json
import os
from typing import Any

import torch
from transformers import PretrainedConfig

from siirl.compiler.backends.rollouts import sglang_version
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.engines.rollout.call_limits import (
    MAX_CPU_CACHE_BYTES,
    cache_bytes_per_token,
    cached_tokens,
    max_model_len,
)
from siirl.engines.rollout.served.served_rollout import ServedRollout
from siirl.model_files.directory import model_dir

BESIDE = 2
"""Positions that SGLang wants of a context besides prompt and response."""


def engine_arguments(
    cfg: Config, model_dir: str, hf_config: PretrainedConfig, device: torch.device
) -> dict[str, Any]:
    """Arguments of SGLang's ServerArgs. rollout.engine_kwargs.sglang goes last and wins."""
    rollout, model = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.model
    max_len = max_model_len(cfg, hf_config)
    arguments = {
        "model_path": model_dir,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": rollout.dtype,
        "device": device.type,
        "context_length": max_len + BESIDE,
        "max_running_requests": rollout.max_num_seqs,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "max_prefill_tokens": max(rollout.max_num_batched_tokens, max_len),
        "disable_cuda_graph": rollout.enforce_eager or device.type == "cpu",
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(model.override_config),
        "random_seed": cfg.trainer.seed,
        "grammar_backend": "none",
        "watchdog_timeout": cfg.trainer.deadline_s,
        "log_level": "warning",
    }
    if device.type == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "max_total_tokens": _cpu_cache_tokens(cfg, hf_config, max_len),
        }
    else:
        arguments |= {
            "mem_fraction_static": rollout.gpu_memory_utilization,
            "enable_memory_saver": rollout.free_cache_engine,
        }
    return arguments | rollout.engine_kwargs.sglang


def engine_environment(device: torch.device, visible: list[str]) -> dict[str, str]:
    """Environment of the engine's process, on top of the worker's. visible: GPUs that it may see."""
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # by BESIDE, which holds no token
    if device.type == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return env | {name: value for name, value in WISHES.items() if name not in os.environ}


WISHES = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""Environment that the user's goes before: a trainer on the same GPU is no imbalance."""


def _cpu_cache_tokens(cfg: Config, hf_config: PretrainedConfig, max_len: int) -> int:
    """Tokens of a KV cache that holds max_num_seqs of the longest rows, up to MAX_CPU_CACHE_BYTES."""
    tokens = cached_tokens(cfg.actor_rollout_ref.rollout.max_num_seqs, max_len + BESIDE)
    return min(tokens, MAX_CPU_CACHE_BYTES // cache_bytes_per_token(hf_config))


class SGLangRollout(ServedRollout):
    """Samples with an SGLang engine on one GPU, or on the CPU, see ServedRollout."""

    backend = "sglang"
    title = "SGLang"
    native = "siirl.engines.rollout.sglang.native_engine"

    def check_here(self, plan: ModelPlan, cfg: Config, device: torch.device) -> None:
        """See ServedRollout."""
        sglang_version()

    def engine_arguments(self, plan: ModelPlan, hf_config: Any, num_ranks: int) -> dict[str, Any]:
        """See ServedRollout."""
        folder = str(model_dir(self._cfg.actor_rollout_ref.model.path))
        return engine_arguments(self._cfg, folder, hf_config, self._device)

    def engine_environment(self, num_ranks: int, gpus: list[str]) -> dict[str, str]:
        """See ServedRollout."""
        return engine_environment(self._device, gpus)
