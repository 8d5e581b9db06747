"""What must hold for a rollout on vLLM, or on a service: what its engine takes, and how it is cut. Pure."""

from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.memory.estimate import read_shape
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.errors import ConfigError, DagError, PlacementError
from siirl.parallel.dims import ParallelDims

KEY = "actor_rollout_ref.rollout"
_DRAWS = "siirl draws the tokens by their seeds and says their log-probs. Remove it."
_DRAFTS = "tokens are drawn one by one, by their seeds. Remove it."
_LOADS = "siirl makes the engine and sends its weights. Remove it."
_TOKENS = "requests and answers are token ids. Remove it."
_RANKS = f"the plan says which ranks share an engine. Set {KEY}.tensor_model_parallel_size, or more ranks."
_ADAPTERS = "siirl loads the adapters that it trains. Remove it."
_ENDS = "siirl reads a response when it is complete. Remove it."

NOT_GIVEN = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _DRAFTS),
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


def check_openai(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> None:
    """All that must hold for a service that speaks in interactions; raises UserError."""
    url = cfg.actor_rollout_ref.rollout.agent.endpoint.url
    if not (url or "").startswith(("http://", "https://")):
        raise ConfigError(
            f"{node}: rollout.agent.endpoint.url={url!r}: rollout.name=openai needs the http(s) address of a "
            "service, e.g. http://localhost:8000/v1/chat/completions."
        )
    if not node.op.is_handed or node.writes:
        raise DagError(
            f"{node} has rollout.name=openai: a service speaks in interactions, but not first, and cannot be "
            "trained (its tokens are unknown). Let the node depend on a rollout of another agent, and give "
            "its agent no other nodes."
        )


def check_vllm(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> None:
    """All that must hold for an engine of vLLM; raises UserError."""
    check_trained_model(cfg, role, str(node))
    _check_arguments(cfg, node)
    key = f"actor_rollout_ref.rollout.tensor_model_parallel_size={dims.tp}"
    if dims.tp > cfg.trainer.n_gpus_per_node:
        raise PlacementError(
            f"{node}: {key} is more than trainer.n_gpus_per_node={cfg.trainer.n_gpus_per_node}: the GPUs of "
            "one engine are on one machine. Lower it."
        )
    shape = read_shape(cfg, role)
    if isinstance(shape, str) or dims.tp == 1:
        return
    for what, count in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        whole = count % dims.tp == 0 or (count == shape.kv_heads and dims.tp % count == 0)
        if not whole:
            fits = [size for size in range(1, dims.tp) if count % size == 0]
            raise PlacementError(
                f"{node}: {key} does not divide the model's {count} {what}: each GPU holds whole heads. "
                f"Set it to {' or '.join(map(str, fits))}."
            )


def _check_arguments(cfg: Config, node: ResolvedNode) -> None:
    """Raise for arguments that would undo what siirl tells vLLM."""
    for name, why in NOT_GIVEN.items():
        if name in cfg.actor_rollout_ref.rollout.engine_kwargs.vllm:
            raise ConfigError(f"{node}: {KEY}.engine_kwargs.vllm.{name}: {why}")
