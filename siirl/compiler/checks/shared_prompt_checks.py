"""Where vLLM cannot read a prompt once for its responses (rollout.share_prompts_in_decode). Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.errors import NotSupportedError
from siirl.models.config_json import as_built
from siirl.models.families import family_of, types_with

KEY = "actor_rollout_ref.rollout.share_prompts_in_decode"
DECIDED = ("attention_backend", "attention_config")
"""Arguments of vLLM's engine that choose another attention."""


def check_shared_prompts(cfg: Config, node: ResolvedNode) -> None:
    """Raise where the key would do nothing, or where it was not seen to give the same numbers."""
    if not cfg.actor_rollout_ref.rollout.share_prompts_in_decode:
        return
    for problem in _problems(cfg):
        raise NotSupportedError(f"not supported yet: {node}: {KEY} {problem}. Set it to False.")


def _problems(cfg: Config) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    given = rollout.engine_kwargs.vllm
    if cfg.trainer.device == "cpu":
        yield "with trainer.device=cpu: it is for Hopper GPUs"
    if given.get("enable_prefix_caching") is False:
        yield "with engine_kwargs.vllm.enable_prefix_caching=False: responses then share no blocks"
    if rollout.speculative_tokens:
        yield f"with speculative_tokens={rollout.speculative_tokens}: a row then has several tokens in a step"
    for name in DECIDED:
        if name in given:
            yield f"with engine_kwargs.vllm.{name}: both choose vLLM's attention"
    if rollout.dtype == "float32":
        yield "with dtype=float32: FlashAttention is for bfloat16 and float16"
    model = cfg.actor_rollout_ref.model
    yield from _of_model(as_built(model))


def _of_model(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("model_type")
    if kind is None:  # a folder that is not there is said elsewhere
        return
    family = family_of(kind)
    if not family.vllm.shares_prompts:
        plain = ", ".join(types_with(lambda row: row.vllm.shares_prompts))
        yield f"for a {kind}: seen or of plain attention are {plain}"
    windowed = config.get("use_sliding_window", family.windows) and config.get("sliding_window")
    if windowed or "sliding_attention" in (config.get("layer_types") or ()):
        yield "for layers with a sliding window: each row then reads another part of the prompt"
