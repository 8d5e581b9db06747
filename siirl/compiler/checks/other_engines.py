"""Which rollout engine samples a policy that the one that was asked for does not: what refusals advise. Pure.

An engine is advised only if the next check accepts it: it takes models of the type, and its devices hold it.
"""

from collections.abc import Iterator

from siirl.compiler.memory.estimate import BYTES, ModelShape, read_shape
from siirl.config import Config
from siirl.config.roles import role_model
from siirl.models.config_json import as_built
from siirl.models.sampled import why_not_in_vllm
from siirl.spelling import GIB

LARGEST_GIB = 288.0
"""Of the devices that there are (B300)."""
ROLLOUT = "actor_rollout_ref.rollout"
TENSOR = f"{ROLLOUT}.tensor_model_parallel_size"
_STATE_BYTES = 16
"""Of a parameter that is trained, on the ranks together: weights and gradient, AdamW's moments in float32."""


def another_engine(cfg: Config, but: str) -> str:
    """The sentence that ends a refusal: what to set for a policy that the engine `but` does not sample."""
    able = [words for name, words in _able(cfg) if name != but]
    if able:
        return f"Set {', or '.join(able)}."
    shape = read_shape(cfg, "actor")
    size = ""
    if isinstance(shape, ModelShape):
        size = f"{shape.params * BYTES[cfg.actor_rollout_ref.rollout.dtype] / GIB:,.0f} GiB"
    return (
        f"No other engine of siirl samples it: transformers (rollout.name=hf) has all weights on each rank: "
        f"{size} of {_device_gib(cfg):g}, beside what is trained. Train it by SFT or DPO "
        "(docs/given_responses.md), or another model."
    )


def engine_sizes_that_divide(shape: ModelShape, cfg: Config, ranks: int) -> list[int]:
    """GPUs that a vLLM engine can have: whole heads on each, and whole engines on a machine and the ranks."""
    gpus = cfg.trainer.n_gpus_per_node
    return [
        size
        for size in range(1, gpus + 1)
        if gpus % size == ranks % size == shape.heads % size == 0
        and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0)
    ]


def engine_sizes_that_hold(shape: ModelShape, cfg: Config, ranks: int) -> list[int]:
    """Those of them that hold the weights in their share of a device."""
    rollout, sizes = cfg.actor_rollout_ref.rollout, engine_sizes_that_divide(shape, cfg, ranks)
    room = rollout.device_share * _device_gib(cfg) * GIB
    whole = shape.params * BYTES[rollout.dtype]
    return [size for size in sizes if whole / size < room or cfg.trainer.device == "cpu"]


def whole_weights_fit(cfg: Config, shape: ModelShape | str, copies: int) -> bool:
    """Whether a device holds one of so many parts of a model's weights beside the policy that it trains; True
    where sizes are not known, and on CPUs."""
    policy = read_shape(cfg, "actor")
    if not isinstance(shape, ModelShape) or not isinstance(policy, ModelShape) or cfg.trainer.device == "cpu":
        return True
    ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    held = shape.params * BYTES[cfg.actor_rollout_ref.rollout.dtype] / copies
    return held + policy.params * _STATE_BYTES / ranks <= _device_gib(cfg) * GIB


def _able(cfg: Config) -> Iterator[tuple[str, str]]:
    """(engine, what to set for it) of engines that sample the policy."""
    rollout, shape = cfg.actor_rollout_ref.rollout, read_shape(cfg, "actor")
    config, tensor = as_built(role_model(cfg, "actor")), rollout.tensor_model_parallel_size
    if not why_not_in_vllm(config, on_cpu=cfg.trainer.device == "cpu", dtype=rollout.dtype):
        ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
        fits = [tensor] if isinstance(shape, str) else engine_sizes_that_hold(shape, cfg, ranks)
        words = f"{ROLLOUT}.name=vllm"
        if fits:
            yield "vllm", words if tensor in fits else f"{words} {TENSOR}={fits[0]}"
    if whole_weights_fit(cfg, shape, 1):
        words = [f"{ROLLOUT}.name=hf"] * (rollout.name != "hf") + [f"{TENSOR}=1"] * (tensor > 1)
        yield "hf", " ".join(words)


def _device_gib(cfg: Config) -> float:
    return cfg.trainer.device_memory_gib or LARGEST_GIB
