"""A rough memory estimate per rank, from the model's config.json: how many parameters, what each engine
keeps of them.

Counted: parameters, gradients, AdamW's two moments, the unsharded copy of the layer that computes,
activations of one micro-batch, the rollout's weights and KV cache. Not counted: the allocator's slack,
communication buffers, CUDA context. Expect the truth within some tens of percent.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.config import Config
from siirl.config.common import ModelConfig
from siirl.config.roles import mini_batch_prompts, role_group, role_model
from siirl.dag.ops import uses_full_kl
from siirl.dag.plan import ModelPlan

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
ACTIVATIONS_PER_LAYER = 16  # values of width hidden_size that a layer keeps for its backward pass


@dataclass(frozen=True)
class ModelShape:
    """What is computed from a model's sizes. params: all, tied ones once; layer_params: of the largest layer.

    intermediate: width of dense MLPs; expert_width: of each expert; shared_width: of the expert that all
    tokens pass. experts, top_k: 0 in a dense model. moe_layers: layers that have experts; expert_params: all
    experts of one of them. variant: what it has beyond its family's usual parts, or empty.
    """

    family: str
    variant: str
    params: int
    embedding_params: int
    layer_params: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int
    heads: int
    kv_heads: int
    tied: bool
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    expert_params: int
    moe_layers: int


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one kind on one rank. host: they wait in host memory between phases (offload)."""

    model: str
    what: str
    num_bytes: int
    host: bool = False


def read_shape(cfg: Config, role: str) -> ModelShape | str:
    """The shape of a role's model, or why it is not known: the estimate is then left out."""
    model = role_model(cfg, role)
    directory = Path(model.path).expanduser()
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        return f"{directory / 'config.json'} cannot be read ({type(error).__name__})"
    raw = {**raw, **model.override_config}
    if raw.get("model_type") not in FAMILIES:
        return f"model_type {raw.get('model_type')!r} is none of {', '.join(FAMILIES)}"
    try:
        return model_shape(raw)
    except KeyError as error:
        return f"{directory / 'config.json'} lacks {error}"


def model_shape(raw: dict[str, Any]) -> ModelShape:
    """Parameter counts of a Llama-shaped decoder, dense or with experts, from its config.json."""
    hidden, layers, heads = raw["hidden_size"], raw["num_hidden_layers"], raw["num_attention_heads"]
    family = raw["model_type"]
    head_dim = raw.get("head_dim") or hidden // heads
    q_width, kv_width = heads * head_dim, (raw.get("num_key_value_heads") or heads) * head_dim
    attention = 2 * hidden * q_width + 2 * hidden * kv_width
    if family.startswith("qwen2"):
        attention += q_width + 2 * kv_width
    elif raw.get("attention_bias"):
        attention += q_width + 2 * kv_width + hidden
    if family.startswith("qwen3"):
        attention += 2 * head_dim
    norms = 2 * hidden
    per_layer = [attention + norms + _mlp_params(raw, index) for index in range(layers)]
    moe_layers = sum(_has_experts(raw, index) for index in range(layers))
    experts = (raw.get("num_experts") or raw["num_local_experts"]) if moe_layers else 0
    expert_width = raw.get("moe_intermediate_size") or raw["intermediate_size"]
    embedding = raw["vocab_size"] * hidden
    copies = 1 if raw.get("tie_word_embeddings") else 2
    return ModelShape(
        family=family,
        variant=_variant(raw),
        params=sum(per_layer) + hidden + copies * embedding,
        embedding_params=copies * embedding,
        layer_params=max(per_layer, default=0),
        layers=layers,
        hidden=hidden,
        intermediate=raw["intermediate_size"],
        vocabulary=raw["vocab_size"],
        kv_width=kv_width,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        tied=copies == 1,
        experts=experts,
        top_k=raw.get("num_experts_per_tok", 0) if moe_layers else 0,
        expert_width=expert_width,
        shared_width=raw.get("shared_expert_intermediate_size", 0) if moe_layers else 0,
        expert_params=experts * 3 * hidden * expert_width,
        moe_layers=moe_layers,
    )


def _variant(raw: dict[str, Any]) -> str:
    activation = raw.get("hidden_act", "silu")
    found = [name for name in ("attention_bias", "mlp_bias") if raw.get(name)]
    if activation not in ("silu", "swish"):
        found.append(f"hidden_act={activation}")
    if raw.get("use_sliding_window") or (raw["model_type"] == "mixtral" and raw.get("sliding_window")):
        found.append("sliding windows")
    return ", ".join(found)


def _has_experts(raw: dict[str, Any], layer: int) -> bool:
    if raw["model_type"] == "mixtral":
        return True
    dense = layer in raw.get("mlp_only_layers", []) or (layer + 1) % raw.get("decoder_sparse_step", 1)
    return raw["model_type"].endswith("_moe") and not dense


def _mlp_params(raw: dict[str, Any], layer: int) -> int:
    hidden, width = raw["hidden_size"], raw["intermediate_size"]
    if raw["model_type"] == "mixtral":
        experts = raw["num_local_experts"]
        return experts * 3 * hidden * width + hidden * experts
    if not raw["model_type"].endswith("_moe"):
        bias = 2 * width + hidden if raw.get("mlp_bias") else 0
        return 3 * hidden * width + bias
    if not _has_experts(raw, layer):
        return 3 * hidden * width
    experts = raw.get("num_experts") or raw["num_local_experts"]
    count = experts * 3 * hidden * raw["moe_intermediate_size"] + hidden * experts
    if raw["model_type"] == "qwen2_moe":
        count += 3 * hidden * raw["shared_expert_intermediate_size"] + hidden
    return count


def fsdp_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int) -> list[MemoryLine]:
    """What one rank holds of a model under FSDP2."""
    fsdp = role_group(cfg, model.role).fsdp_config
    master, compute = BYTES[fsdp.model_dtype], BYTES[fsdp.mixed_precision.param_dtype]
    shards = model.dims.dp_shard * model.dims.tp * model.dims.pp
    adapter = adapter_params(role_model(cfg, model.role), shape) if model.trains else 0
    own = (shape.params if model.base in (None, model.name) else 0) + adapter
    lines = [MemoryLine(model.name, "parameters", -(-own // shards) * master, fsdp.param_offload)]
    if model.trains:
        trained = -(-(adapter or shape.params) // shards)
        lines.append(MemoryLine(model.name, "gradients", trained * master))
        lines.append(MemoryLine(model.name, "optimizer", 2 * trained * master, fsdp.optimizer_offload))
    gathered = 2 * shape.layer_params + shape.embedding_params
    lines.append(MemoryLine(model.name, "gathered layers", gathered * compute))
    tokens = micro_batch_tokens(model, cfg)
    lines.append(MemoryLine(model.name, "activations", _activations(model, cfg, shape, tokens) * compute))
    return lines + full_kl_lines(model, cfg, shape, rows_per_shard, compute)


def full_kl_lines(
    model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int, width: int
) -> list[MemoryLine]:
    """What the KL over the whole vocabulary adds: the reference's last hidden states of all rows of a rank,
    on the host until the update; at the actor those of a micro-batch, and the reference's output layer.

    width: bytes of a number in the type that the model computes in.
    """
    if not uses_full_kl(cfg) or not (model.trains if model.role == "actor" else model.role == "ref"):
        return []
    tokens = rows_per_shard * cfg.actor_rollout_ref.rollout.response_length
    if model.role == "ref":
        return [MemoryLine(model.name, "hidden states", tokens * shape.hidden * width, host=True)]
    tokens = min(tokens, micro_batch_tokens(model, cfg))
    words = -(-shape.vocabulary // model.dims.tp)
    return [MemoryLine(model.name, "hidden states", (words + tokens) * shape.hidden * width)]


def adapter_params(model: ModelConfig, shape: ModelShape) -> int:
    """Numbers in a LoRA adapter on all linear layers of a dense model; fewer target_modules have fewer."""
    q_width = shape.hidden if not shape.heads else shape.kv_width // shape.kv_heads * shape.heads
    widths = [(shape.hidden, q_width), (q_width, shape.hidden), *2 * [(shape.hidden, shape.kv_width)]]
    widths += 3 * [(shape.hidden, shape.intermediate)]
    return model.lora_rank * shape.layers * sum(map(sum, widths))


def micro_batch_tokens(model: ModelPlan, cfg: Config) -> int:
    """The most tokens of one micro-batch on a rank."""
    policy = cfg.actor_rollout_ref
    row = policy.rollout.prompt_length + policy.rollout.response_length
    if model.role == "critic":
        dynamic = cfg.critic.use_dynamic_bsz
        budget, rows = cfg.critic.ppo_max_token_len_per_gpu, cfg.critic.ppo_micro_batch_size_per_gpu
    elif model.role == "reward":
        group = cfg.reward_model
        row = group.max_length or row
        dynamic, budget = group.use_dynamic_bsz, group.forward_max_token_len_per_gpu
        rows = group.micro_batch_size_per_gpu
    elif model.trains:
        dynamic = policy.actor.use_dynamic_bsz
        budget, rows = policy.actor.ppo_max_token_len_per_gpu, policy.actor.ppo_micro_batch_size_per_gpu
    else:
        dynamic = policy.ref.log_prob_use_dynamic_bsz
        budget, rows = policy.ref.log_prob_max_token_len_per_gpu, policy.ref.log_prob_micro_batch_size_per_gpu
    return max(budget, row) if dynamic else rows * row


def micro_batches(model: ModelPlan, cfg: Config) -> int:
    """Micro-batches of a mini-batch on a rank of a trained model; by token budget, of the longest rows."""
    rollout = cfg.actor_rollout_ref.rollout
    row = rollout.prompt_length + rollout.response_length
    rows = -(-mini_batch_prompts(cfg, model.role) * rollout.n // model.dims.dp)
    return -(-rows * row // micro_batch_tokens(model, cfg))


def _activations(model: ModelPlan, cfg: Config, shape: ModelShape, tokens: int) -> int:
    """Values kept for a micro-batch: each layer's input, and one layer (or all of them) in full."""
    layer = ACTIVATIONS_PER_LAYER * shape.hidden + 3 * shape.intermediate
    if not model.trains:
        return tokens * layer
    if role_model(cfg, model.role).enable_gradient_checkpointing:
        return tokens * (shape.layers * shape.hidden + layer)
    return tokens * shape.layers * layer


def rollout_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int) -> list[MemoryLine]:
    """What one rank holds of a rollout engine's model. rows_per_shard: rows of a whole batch."""
    rollout = cfg.actor_rollout_ref.rollout
    width = BYTES[rollout.dtype]
    at_once = min(rows_per_shard, rollout.max_num_seqs)
    cache = 2 * shape.layers * shape.kv_width * at_once * (rollout.prompt_length + rollout.response_length)
    if model.backend == "vllm" and model.base not in (None, model.name):
        cache = 0  # one engine, and its cache, for all adapters
    tp = model.dims.tp
    adapter = adapter_params(cfg.actor_rollout_ref.model, shape) if model.base else 0
    params = (shape.params if model.base in (None, model.name) else 0) + adapter
    return [
        MemoryLine(model.name, "weights", -(-params // tp) * width),
        MemoryLine(model.name, "KV cache", -(-cache // tp) * width),
    ]
