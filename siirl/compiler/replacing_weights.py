"""Which engines have their weights written where the first sync put them (rollout.replace_weights). Pure."""

from siirl.compiler.model_types import model_type_of
from siirl.compiler.plan import ModelPlan
from siirl.config import Config

SEEN = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
"""Model types of which updates in place were held against those by vLLM's loaders."""


def writes_in_place(model: ModelPlan, cfg: Config) -> bool:
    """Whether an engine's second sync and further ones are in place, of a backend that can do that."""
    way = cfg.actor_rollout_ref.rollout.replace_weights
    if way != "auto":
        return way != "by_loaders"
    return not why_by_loaders(model, cfg) and model_type_of(cfg.actor_rollout_ref.model) in SEEN


def why_by_loaders(model: ModelPlan, cfg: Config) -> str:
    """Why a backend that can write weights in place cannot, or was not seen to; "" if it can."""
    rollout, kind = cfg.actor_rollout_ref.rollout, model_type_of(cfg.actor_rollout_ref.model)
    if rollout.quantization or "quantization" in rollout.engine_kwargs.vllm:
        return "with quantized weights: each sync rounds them anew"
    if model.base is not None:
        return "for adapters that are not merged, whose base comes once"
    if cfg.trainer.rollout_only:
        return "with trainer.rollout_only=true: weights come once"
    if kind and kind not in SEEN:
        return f"for a {kind}: it was held against vLLM's loaders for {', '.join(SEEN)} only"
    return ""
