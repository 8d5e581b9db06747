"""Megatron configurations for tests that need no engine: config.json of public models, and plans of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from plan_cases import config

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.plan import Plan
from siirl.config import Config

ACTOR = "actor_rollout_ref.actor.megatron"
REF = "actor_rollout_ref.ref.megatron"

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "vocab_size": 151552,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-405B": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
"""The sizes in the config.json of each model, by its name on the hub."""


def write_model(directory: Path, name: str, **changes: Any) -> Path:
    """A directory with the config.json of a model; changes replace values of it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**MODELS[name], **changes}))
    return directory


def megatron_config(*overrides: str, model: Path | None = None, rows: int = 512) -> Config:
    """A GRPO run of one optimizer step whose actor and reference run on Megatron-Core."""
    path = () if model is None else (f"actor_rollout_ref.model.path={model}",)
    batch = (f"data.train_batch_size={rows}", f"actor_rollout_ref.actor.ppo_mini_batch_size={rows}")
    cfg = config(*batch, *path, *overrides)
    policy = cfg.actor_rollout_ref
    actor = dataclasses.replace(policy.actor, strategy="megatron")
    ref = dataclasses.replace(policy.ref, strategy="megatron")
    return dataclasses.replace(cfg, actor_rollout_ref=dataclasses.replace(policy, actor=actor, ref=ref))


def megatron_plan(
    world_size: int, *overrides: str, model: Path | None = None, rows: int = 512
) -> tuple[Plan, dict[str, Config]]:
    """The plan of the GRPO template with megatron_config."""
    cfg = megatron_config(*overrides, model=model, rows=rows)
    return compile_plan(load_dag(cfg), cfg, world_size)


def sizes(**parallel: Any) -> tuple[str, ...]:
    """Overrides for the actor's megatron group; short names for tp, pp, cp, ep, etp, vpp and sp."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "sp": "sequence_parallel",
    }
    return tuple(f"{ACTOR}.{names.get(name, name)}={value}" for name, value in parallel.items())


def option(name: str, value: Any) -> str:
    """Override for one option of TransformerConfig."""
    return f"{ACTOR}.override_transformer_config.{name}={value}"
