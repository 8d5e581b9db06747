"""Engines whose weights shall be written where the first sync put them (rollout.replace_weights). Pure."""

from collections.abc import Iterator, Mapping

from siirl.compiler.backends import backend_of
from siirl.compiler.model_types import model_type_of
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config
from siirl.errors import NotSupportedError

KEY = "actor_rollout_ref.rollout.replace_weights"
SEEN = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
"""Model types of which updates in place were held against those by vLLM's loaders."""


def check_weights_in_place(plan: Plan, configs: Mapping[str, Config]) -> Iterator[NotSupportedError]:
    """Engines that cannot write weights in place, or were not seen to."""
    for model in plan.models.values():
        cfg = configs[model.node]
        way = cfg.actor_rollout_ref.rollout.replace_weights
        if model.is_rollout and way != "by_loaders" and (why := _why_not(model, cfg)):
            yield NotSupportedError(
                f"not supported yet: node {model.node!r}: {KEY}={way} {why}. Set {KEY}=by_loaders."
            )


def _why_not(model: ModelPlan, cfg: Config) -> str:
    rollout, kind = cfg.actor_rollout_ref.rollout, model_type_of(cfg.actor_rollout_ref.model)
    if not backend_of(model).writes_in_place:
        return f"with rollout.name={rollout.name}: it takes weights in its own way"
    if rollout.quantization or "quantization" in rollout.engine_kwargs.vllm:
        return "with quantized weights: each sync rounds them anew"
    if model.base is not None:
        return "for adapters that are not merged, whose base comes once"
    if cfg.trainer.rollout_only:
        return "with trainer.rollout_only=true: weights come once"
    if kind and kind not in SEEN:
        return f"for a {kind}: it was held against vLLM's loaders for {', '.join(SEEN)} only"
    return ""
