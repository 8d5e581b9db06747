"""What cannot be given to vLLM's engine past siirl's keys, and what tokens are guessed for. Pure."""

from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.errors import ConfigError, NotSupportedError
from siirl.models.config_json import model_type_of
from siirl.models.families import family_of

KEY = "actor_rollout_ref.rollout"
_DRAWS = "siirl draws the tokens by their seeds and says their log-probs. Remove it."
_GUESSES = f"tokens are guessed by {KEY}.speculative_tokens, and drawn by their seeds. Set that."
_LOADS = "siirl makes the engine and sends its weights. Remove it."
_TOKENS = "requests and answers are token ids. Remove it."
_RANKS = f"the plan says which ranks share an engine. Set {KEY}.tensor_model_parallel_size, or more ranks."
_ADAPTERS = "siirl loads the adapters that it trains. Remove it."
_ENDS = "siirl reads a response when it is complete. Remove it."

NOT_GIVEN = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _GUESSES),
    **dict.fromkeys(
        ("logprobs_mode", "logits_processors", "generation_config", "override_generation_config"), _DRAWS
    ),
    "max_logprobs": _DRAWS,
    **dict.fromkeys(
        ("model", "model_weights", "load_format", "model_loader_extra_config", "weight_transfer_config"),
        _LOADS,
    ),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "runner", "convert"), _LOADS),
    **dict.fromkeys(("skip_tokenizer_init", "tokenizer", "tokenizer_mode", "enable_prompt_embeds"), _TOKENS),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes", "node_rank"),
        _RANKS,
    ),
    **dict.fromkeys(("prefill_context_parallel_size", "decode_context_parallel_size"), _RANKS),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "default_mm_loras"), _ADAPTERS),
    "stream_interval": _ENDS,
    "dtype": f"that is a key. Set {KEY}.dtype.",
    "max_model_len": f"that is a key. Set {KEY}.max_model_len.",
    "enable_sleep_mode": f"that follows from a key. Set {KEY}.free_cache_engine.",
    "trust_remote_code": "that is a key. Set actor_rollout_ref.model.trust_remote_code.",
    "hf_overrides": "that is a key. Set actor_rollout_ref.model.override_config.",
}
"""Arguments of vLLM's engine that cannot be given by engine_kwargs.vllm, and why."""


def check_vllm_arguments(cfg: Config, node: ResolvedNode) -> None:
    """Raise for arguments that would undo what siirl tells vLLM, and for guesses that were not seen."""
    rollout = cfg.actor_rollout_ref.rollout
    for name, why in NOT_GIVEN.items():
        if name in rollout.engine_kwargs.vllm:
            raise ConfigError(f"{node}: {KEY}.engine_kwargs.vllm.{name}: {why}")
    if rollout.speculative_tokens and (problem := _no_guesses(cfg)):
        raise NotSupportedError(
            f"not supported yet: {node}: {KEY}.speculative_tokens={rollout.speculative_tokens} {problem}. "
            "Set it to 0."
        )


def _no_guesses(cfg: Config) -> str:
    actor_rollout_ref = cfg.actor_rollout_ref
    if family_of(model_type_of(actor_rollout_ref.model)).sees_images:
        return "for a model that sees images: only rows of texts were seen with it"
    if actor_rollout_ref.actor.router_replay.mode == "R3":
        return (
            "with actor.router_replay.mode=R3: that vLLM says the experts of tokens that were guessed has "
            "not been seen"
        )
    return ""
