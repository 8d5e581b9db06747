"""The one place where a backend is chosen: by its name in the plan, and for training also by the head of
the model.

Backends are imported when they are built, so that a run needs only the packages of those it uses.
"""

import importlib
from typing import Any

import torch

from siirl.compiler.plan import Head, ModelPlan
from siirl.config import Config
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.errors import ConfigError, NotSupportedError
from siirl.parallel.process_groups import ProcessGroupManager
from siirl.spelling import suggest

FSDP_STRATEGIES: dict[Head, str] = {
    "lm": "siirl.engines.train.fsdp:FSDPEngine",
    "value": "siirl.engines.train.fsdp:FSDPEngine",
    "score": "siirl.engines.train.fsdp:FSDPEngine",
}
"""Head -> class, under fsdp."""

MEGATRON_STRATEGIES: dict[Head, str] = {
    "lm": "siirl.engines.train.megatron.engine:MegatronEngine",
    "value": "siirl.engines.train.megatron.engine:MegatronEngine",
    "score": "siirl.engines.train.megatron.engine:MegatronEngine",
}
"""Head -> class, under megatron."""

TRAIN_ENGINES: dict[str, dict[Head, str]] = {"fsdp": FSDP_STRATEGIES, "megatron": MEGATRON_STRATEGIES}
"""Strategy -> head -> class."""

ROLLOUT_ENGINES: dict[str, str] = {
    "hf": "siirl.engines.rollout.hf.hf_rollout:HFRollout",
    "vllm": "siirl.engines.rollout.vllm.vllm_rollout:VLLMRollout",
    "openai": "siirl.engines.rollout.openai_endpoint:OpenAIRollout",
}
"""Name -> class."""


def make_train_engine(
    plan: ModelPlan,
    cfg: Config,
    groups: ProcessGroupManager,
    device: torch.device,
    base: TrainEngine | None = None,
) -> TrainEngine:
    """The training engine of a model; cfg: its node's resolved config. Collective over the model's ranks.

    base: the engine of plan.base, if that is another model.
    """
    heads = _named(TRAIN_ENGINES, plan.backend, "strategy", plan)
    if plan.head not in heads:
        raise NotSupportedError(
            f"not supported yet: strategy {plan.backend!r} with a {plan.head} head (model {plan.name!r}): "
            f"it has heads {', '.join(heads)}."
        )
    return _load(heads[plan.head])(plan, cfg, groups, device, **({"base": base} if base else {}))


def make_rollout_engine(
    plan: ModelPlan,
    cfg: Config,
    groups: ProcessGroupManager,
    device: torch.device,
    base: RolloutEngine | None = None,
) -> RolloutEngine:
    """The rollout engine of a model; cfg: its node's resolved config. Local to its shard's ranks.

    base: the engine of plan.base, if that is another model.
    """
    engine = _load(_named(ROLLOUT_ENGINES, plan.backend, "rollout engine", plan))
    return engine(plan, cfg, groups, device, **({"base": base} if base else {}))


def _named(table: dict[str, Any], name: str, kind: str, plan: ModelPlan) -> Any:
    if name not in table:
        raise ConfigError(
            f"unknown {kind} {name!r} for model {plan.name!r}: known are {', '.join(table)}. "
            f"{suggest(name, table)}"
        )
    return table[name]


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
