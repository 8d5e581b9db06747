"""Where engines are built: the class that the table of backends names (siirl/compiler/backends).

It is imported then, so that a run needs only the packages of the backends that it uses.
"""

import importlib
from typing import Any

import torch

from siirl.compiler.backends import backend_of
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.parallel.process_groups import ProcessGroupManager


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
    return engine_class(plan)(plan, cfg, groups, device, **({"base": base} if base else {}))


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
    return engine_class(plan)(plan, cfg, groups, device, **({"base": base} if base else {}))


def engine_class(plan: ModelPlan) -> Any:
    """The class of a model's engine."""
    module, name = backend_of(plan).engine.split(":")
    return getattr(importlib.import_module(module), name)
