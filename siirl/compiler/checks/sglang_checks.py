"""What a rollout on SGLang does not do yet."""

from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.errors import ConfigError, NotSupportedError
from siirl.models.config_json import model_type_of
from siirl.models.families import family_of, types_with

_DRAWS = "siirl draws the tokens, one after another and by their seeds. Remove it."
_LOADS = "siirl loads the weights. Remove it."
_ROUNDS = "numbers below 16 bits were not seen to stay near the trainer's log-probs. Remove it."
_RANKS = "an engine has one GPU. Remove it, and place the rollout on more ranks."
_ADAPTERS = "adapters are merged into the weights that each sync sends. Remove it."

NOT_GIVEN = {
    "mem_fraction_static": "memory is planned by rollout.gpu_memory_utilization. Set that.",
    "sampling_backend": _DRAWS,
    "speculative_algorithm": _DRAWS,
    "custom_weight_loader": _LOADS,
    "load_format": _LOADS,
    "skip_tokenizer_init": "requests and answers are token ids. Remove it.",
    "quantization": _ROUNDS,
    "kv_cache_dtype": _ROUNDS,
    "torchao_config": _ROUNDS,
    "enable_lora": _ADAPTERS,
    "lora_paths": _ADAPTERS,
    "tp_size": _RANKS,
    "pp_size": _RANKS,
    "dp_size": _RANKS,
    "ep_size": _RANKS,
}
"""Arguments of SGLang's engine that cannot be given, and why."""


def check_sglang(cfg: Config, ranks: int, node: ResolvedNode) -> None:
    """Raise for what is asked of SGLang and was not seen with siirl. ranks: that share an engine."""
    rollout, kind = cfg.actor_rollout_ref.rollout, model_type_of(cfg.actor_rollout_ref.model)
    if ranks > 1:
        raise NotSupportedError(
            f"not supported yet: {node}: actor_rollout_ref.rollout.tensor_model_parallel_size={ranks} with "
            "rollout.name=sglang: an SGLang engine of several GPUs was not seen with siirl. Set it to 1, or "
            "rollout.name=vllm."
        )
    if kind and not family_of(kind).sglang:
        raise NotSupportedError(
            f"not supported yet: {node}: a {kind} with rollout.name=sglang: that SGLang takes its weights as "
            f"they are trained has been seen of {', '.join(types_with(lambda row: row.sglang))} only. Set "
            "actor_rollout_ref.rollout.name=vllm or hf."
        )
    for name, why in NOT_GIVEN.items():
        if name in rollout.engine_kwargs.sglang:
            raise ConfigError(f"{node}: actor_rollout_ref.rollout.engine_kwargs.sglang.{name}: {why}")
