"""Engines whose weights shall be written where the first sync put them (rollout.replace_weights). Pure."""

from collections.abc import Iterator, Mapping

from siirl.compiler.backends import backend_of
from siirl.compiler.plan import ModelPlan, Plan
from siirl.compiler.replacing_weights import why_by_loaders
from siirl.config import Config
from siirl.errors import NotSupportedError

KEY = "actor_rollout_ref.rollout.replace_weights"


def check_weights_in_place(plan: Plan, configs: Mapping[str, Config]) -> Iterator[NotSupportedError]:
    """Engines that are asked to write weights in place and cannot, or were not seen to."""
    for model in plan.models.values():
        cfg = configs[model.node]
        way = cfg.actor_rollout_ref.rollout.replace_weights
        if model.is_rollout and way not in ("auto", "by_loaders") and (why := _why_not(model, cfg)):
            yield NotSupportedError(
                f"not supported yet: node {model.node!r}: {KEY}={way} {why}. Set {KEY}=by_loaders."
            )


def _why_not(model: ModelPlan, cfg: Config) -> str:
    if not backend_of(model).writes_in_place:
        return f"with rollout.name={cfg.actor_rollout_ref.rollout.name}: it takes weights in its own way"
    return why_by_loaders(model, cfg)
