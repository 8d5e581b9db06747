"""What each rollout engine keeps on a rank, and when: see estimate.py."""

from siirl.compiler.memory.estimate import (
    ALWAYS,
    BYTES,
    ENGINE_CONTEXT_BYTES,
    ENGINE_GRAPHS_BYTES,
    ENGINE_PARTS,
    Activity,
    MemoryLine,
    ModelShape,
    adapter_params,
    offloadable,
)
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.config.roles import role_group, role_model

KEPT_WEIGHTS = "weights for a restart"
"""Of a vLLM engine, in host memory."""
FOLDER_WEIGHTS = "weights of the folder"
"""To which the next changes are applied, in host memory."""
ENDS_TOKENS = 32
"""Of vLLM's blocks that no other sample shares: the last ones of a prompt and of its response."""


def hf_rollout_lines(
    model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int
) -> list[MemoryLine]:
    """What one rank holds of a transformers model that samples. rows_per_shard: rows of a whole batch."""
    rollout = cfg.actor_rollout_ref.rollout
    weights, cache = engine_bytes(model, cfg, shape, rows_per_shard)
    return [
        offloadable(model.name, "weights", weights, rollout.free_cache_engine, ("generate",)),
        MemoryLine(model.name, "KV cache", cache, ("generate",)),
        *_folder_lines(model, cfg, shape),
    ]


def vllm_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int) -> list[MemoryLine]:
    """What one rank holds of a vLLM engine: on a GPU its share of the device, of which weights are a part.

    On a CPU weights, and the KV cache of all rows that run at once. The weights of an engine that may be
    started again are in host memory too.
    """
    rollout = cfg.actor_rollout_ref.rollout
    weights, cache = engine_bytes(model, cfg, shape, rows_per_shard)
    kept = weights if rollout.max_engine_restarts and model.dims.tp == 1 else 0
    on_another = model.base not in (None, model.name)  # one engine, and its cache, for all adapters
    if cfg.trainer.device == "cpu":
        return [
            MemoryLine(model.name, "weights", weights),
            MemoryLine(model.name, KEPT_WEIGHTS, kept),
            MemoryLine(model.name, "KV cache", 0 if on_another else cache),
            *_folder_lines(model, cfg, shape),
        ]
    in_host = MemoryLine(model.name, KEPT_WEIGHTS, kept, (), host=True)
    if on_another:
        return [in_host]
    share = rollout.device_share
    resident: tuple[Activity, ...] = ("generate",) if rollout.free_cache_engine else ALWAYS
    beside = ENGINE_CONTEXT_BYTES if rollout.enforce_eager else ENGINE_GRAPHS_BYTES
    return [
        MemoryLine(model.name, ENGINE_PARTS[0], 0, resident, share=share),
        MemoryLine(model.name, ENGINE_PARTS[1], beside),
        in_host,
        *_folder_lines(model, cfg, shape),
    ]


def _folder_lines(model: ModelPlan, cfg: Config, shape: ModelShape) -> list[MemoryLine]:
    """All of the model on every rank, whatever its engine shards, where weights come by a folder."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.weight_link != "checkpoint":
        return []
    on_host = cfg.trainer.device != "cpu"
    size = shape.params * BYTES[rollout.dtype]
    return [MemoryLine(model.name, FOLDER_WEIGHTS, size, () if on_host else ALWAYS, host=on_host)]


def engine_bytes(
    model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int, shares_prompts: bool = False
) -> tuple[int, int]:
    """Weights, and the KV cache of a batch's rows as far as they run at once, with states of layers.

    shares_prompts: the samples of a prompt find its full blocks in the cache, so it is there once.
    """
    rollout = cfg.actor_rollout_ref.rollout
    width, tp = BYTES[rollout.dtype], model.dims.tp
    at_once = min(rows_per_shard, rollout.max_num_seqs)
    prompts, more = (-(-at_once // rollout.n), ENDS_TOKENS) if shares_prompts else (at_once, 0)
    tokens = prompts * rollout.prompt_length + at_once * (rollout.response_length + more)
    cache = shape.attending * (shape.cached or 2 * shape.kv_width) * tokens
    states = shape.nets.layers * shape.nets.state * BYTES["float32"] * at_once if shape.nets else 0
    adapter = adapter_params(cfg.actor_rollout_ref.model, shape) if model.base else 0
    params = (shape.params if model.base in (None, model.name) else 0) + adapter
    shared = 1 if shape.cached else tp  # each of an engine's devices has all compressed vectors
    return -(-params // tp) * width, -(-cache // shared) * width + states


def version_lines(model: ModelPlan, cfg: Config, shape: ModelShape, number: int) -> list[MemoryLine]:
    """Versions of a policy that opponent pools keep on the host, once all are there."""
    if not number:
        return []
    params = adapter_params(role_model(cfg, model.role), shape) or shape.params
    each = -(-params // model.dims.weight_shards) * BYTES[role_group(cfg, model.role).fsdp_config.model_dtype]
    return [MemoryLine(model.name, "older versions", number * each, (), host=True)]
