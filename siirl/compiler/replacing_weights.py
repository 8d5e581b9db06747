"""Which engines have their weights written where the first sync put them (rollout.replace_weights). Pure."""

from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.models.config_json import model_type_of
from siirl.models.families import family_of, types_with


def writes_in_place(model: ModelPlan, cfg: Config) -> bool:
    """Whether an engine's second sync and further ones are in place, of a backend that can do that."""
    way = cfg.actor_rollout_ref.rollout.replace_weights
    if way != "auto":
        return way != "by_loaders"
    return (
        not why_by_loaders(model, cfg) and family_of(model_type_of(cfg.actor_rollout_ref.model)).vllm.in_place
    )


def why_by_loaders(model: ModelPlan, cfg: Config) -> str:
    """Why a backend that can write weights in place cannot, or was not seen to; "" if it can."""
    rollout, kind = cfg.actor_rollout_ref.rollout, model_type_of(cfg.actor_rollout_ref.model)
    if rollout.quantization or "quantization" in rollout.engine_kwargs.vllm:
        return "with quantized weights: each sync rounds them anew"
    if model.base is not None:
        return "for adapters that are not merged, whose base comes once"
    if cfg.trainer.rollout_only:
        return "with trainer.rollout_only=true: weights come once"
    if kind and not family_of(kind).vllm.in_place:
        seen = ", ".join(types_with(lambda row: row.vllm.in_place))
        return f"for a {kind}: it was held against vLLM's loaders for {seen} only"
    return ""
