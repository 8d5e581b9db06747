"""What a vLLM engine is started with: arguments and environment, from the configuration. Imports no vLLM."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from siirl.config import Config
from siirl.engines.rollout.call_limits import (
    MAX_CPU_CACHE_BYTES,
    NUMBER_BYTES,
    cache_bytes_per_token,
    cached_tokens,
    max_model_len,
)
from siirl.errors import ConfigError, RolloutError
from siirl.models.families import family_of
from siirl.models.sizes import expert_layers, state_numbers

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of LoRA that vLLM has room for: a smaller one takes the next."""
ONLINE = {"fp8": "fp8_per_channel"}
"""rollout.quantization -> vLLM's name of the way in which it rounds weights as they are loaded: e4m3, with a
scale for each output feature, and for each token that they are multiplied by."""
CPU_BLOCK = 128
"""Tokens that a block of vLLM's KV cache on a CPU holds at most."""
LEAST_CPU_CACHE_BYTES = 64 << 20

CPU_LATENT = {
    "attention_backend": "CPU_MLA",
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}
"""Attention over compressed keys and values that any CPU has (another one forgets weights that an update
needs), and rotary embeddings by torch: those of vLLM 0.32's kernel are wrong where queries are a part of a
tensor."""


STATES = {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}
"""Of models whose layers have states: the state of what prompts have in common is not cached, and states are
in the type in which training has them."""


def engine_arguments(
    cfg: Config, model_dir: str, hf_config: PretrainedConfig, tensor_parallel: int, device: torch.device
) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs. rollout.engine_kwargs.vllm goes last and wins."""
    rollout, model = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.model
    max_len = max_model_len(cfg, hf_config)
    # After a part of a prompt, vLLM turns a row's generator back; those of the CPU cannot be turned back.
    chunked = rollout.enable_chunked_prefill and device.type != "cpu"
    arguments = {
        "model": model_dir,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": rollout.dtype,
        "tensor_parallel_size": tensor_parallel,
        "max_model_len": max_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, 0 if chunked else max_len),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": True,
        "enforce_eager": rollout.enforce_eager or device.type == "cpu",
        "disable_log_stats": rollout.disable_log_stats,
        # How much a vision tower takes of a GPU, with the largest image; a CPU has no such bound.
        "skip_mm_profiling": device.type == "cpu",
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": {**model.override_config, **values_read(hf_config)},
        "seed": cfg.trainer.seed,
    }
    if family_of(hf_config.model_type).has_states:
        arguments |= STATES
    if rollout.quantization:
        arguments["quantization"] = ONLINE[rollout.quantization]
    if device.type == "cpu":
        if family_of(hf_config.model_type).latent is not None:
            arguments |= CPU_LATENT
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(cfg, hf_config, max_len)
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        arguments["enable_sleep_mode"] = rollout.free_cache_engine
    arguments |= rollout.engine_kwargs.vllm
    rows = arguments["max_num_seqs"]  # null: vLLM chooses
    if rows and "max_num_batched_tokens" not in rollout.engine_kwargs.vllm:
        most = tokens_of_a_step(arguments["max_num_batched_tokens"], rows, max_len)
        arguments["max_num_batched_tokens"] = most
    return arguments


def values_read(hf_config: PretrainedConfig) -> dict[str, Any]:
    """What vLLM is to read in the place of what config.json says, so that it computes what is trained."""
    values = dict(family_of(hf_config.model_type).vllm.values)
    if getattr(hf_config, "topk_method", None) == "greedy":  # vLLM reads the groups whatever this says
        values |= {"n_group": 1, "topk_group": 1}
    return values


def tokens_of_a_step(most: int, rows: int, longest: int) -> int:
    """Tokens of an engine's largest step: `most`, but no more than its rows can have.

    vLLM warms up with a step of that many tokens, divided evenly to the rows it may run at once, and what is
    left over to the last one. On a GPU its second model runner attends to them, and would read beyond a
    row's line of the block table where one has more than `longest` tokens.
    """
    if most >= rows * longest:
        return rows * longest
    each, left = divmod(most, rows)
    return most - left if each and each + left > longest else most


def engine_environment(tensor_parallel: int, device: torch.device, visible: list[str]) -> dict[str, str]:
    """Environment of the engine's process, on top of the worker's.

    visible: GPUs that it may see.
    """
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    wishes = {"VLLM_LOGGING_LEVEL": "WARNING"}
    if device.type == "cpu":
        # Cores are shared by the engines of all ranks: none may bind to some.
        wishes |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    else:
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(visible), "OMP_NUM_THREADS": "1"}
    if tensor_parallel == 1:
        wishes["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's process is already one of its own
    return env | {name: value for name, value in wishes.items() if name not in os.environ}


def adapter_arguments(adapters: Mapping[str, int]) -> dict[str, Any]:
    """Arguments of vLLM's engine for adapters of these ranks, all of them in memory at once."""
    most = max(adapters.values())
    room = next((rank for rank in RANKS if rank >= most), None)
    if room is None:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={most}: vLLM takes adapters up to rank {RANKS[-1]}. Lower "
            "it, or set rollout.name=hf."
        )
    number = len(adapters)
    return {"enable_lora": True, "max_loras": number, "max_cpu_loras": number, "max_lora_rank": room}


def _cpu_cache_bytes(cfg: Config, hf_config: PretrainedConfig, max_len: int) -> int:
    """A KV cache in host memory that holds max_num_seqs of the longest rows, up to MAX_CPU_CACHE_BYTES.

    Where layers have states, a block of each layer is as large as one.
    """
    blocks = -(-max_len // CPU_BLOCK) + 1
    row_bytes, text = blocks * CPU_BLOCK * cache_bytes_per_token(hf_config), hf_config.get_text_config()
    if family_of(text.model_type).has_states:
        row_bytes += text.num_hidden_layers * state_numbers(text.to_dict()) * NUMBER_BYTES
    whole = cached_tokens(cfg.actor_rollout_ref.rollout.max_num_seqs, row_bytes)
    return min(max(whole, LEAST_CPU_CACHE_BYTES), MAX_CPU_CACHE_BYTES)


ARGUMENT = "enable_return_routed_experts"
"""Of vLLM's engine, from 0.24 on."""


def replayed_layers(arguments: Mapping[str, Any]) -> list[int] | None:
    """The layers whose experts an engine of these arguments says; None: it says none."""
    if not arguments.get(ARGUMENT):
        return None
    text = (Path(arguments["model"]) / "config.json").read_text(encoding="utf-8")
    return expert_layers({**json.loads(text), **arguments.get("hf_overrides", {})})


def experts_of(found: np.ndarray | None, layers: Sequence[int], num_tokens: int) -> bytes | None:
    """What Completion.experts is of a row of so many tokens; None of one that nothing was sampled of.

    found: [tokens but the last, layers of the model, experts of a token]; layers without experts have any
    numbers. RolloutError where it is of other tokens, and where the kernels of vLLM did not say.
    """
    if found is None or found.shape[0] != num_tokens - 1:
        size = "no experts" if found is None else f"experts of {found.shape[0]} tokens"
        raise RolloutError(
            f"vLLM gave {size} for a row of {num_tokens} tokens: it cannot be said which are of which. Set "
            "actor_rollout_ref.actor.router_replay.mode=disabled."
        )
    chosen_NLK = found[:, list(layers)]
    ordered_NLK = np.sort(chosen_NLK, axis=-1)
    if (ordered_NLK[..., 1:] == ordered_NLK[..., :-1]).any():
        raise RolloutError(
            "vLLM says of a token that one expert computed it twice: its kernel chooses experts by itself, "
            "and tells nobody. Choose another one by rollout.engine_kwargs.vllm.moe_backend, or set "
            "actor_rollout_ref.actor.router_replay.mode=disabled."
        )
    return np.ascontiguousarray(chosen_NLK.astype(np.int16)).tobytes()
