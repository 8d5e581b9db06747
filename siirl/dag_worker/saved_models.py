"""What a checkpoint saves and restores of the models of a rank."""

from collections.abc import Mapping

import torch.distributed as dist

from siirl.checkpoint.staging import SavedModel
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config.roles import role_model, trained_group
from siirl.dag_worker.worker import DAGWorker

CONTENTS = ("model", "optimizer", "extra")
"""All that a run needs to go on as it was."""

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""For saves in the background."""


def is_saved(plan: Plan, model: ModelPlan) -> bool:
    """Whether a checkpoint holds a model: in training, or a teacher of a policy's older weights."""
    older = (link.target for link in plan.links.values() if link.is_stale)
    return model.trains or model.name in older


def saved_models(worker: DAGWorker, background: Groups, whole: bool = False) -> dict[str, SavedModel]:
    """This rank's models, and its opponent pools. whole: all of them, whatever the keys say."""
    saved = _pools(worker, background)
    for name, engine in worker.train_engines.items():
        model = worker.plan.models[name]
        if not is_saved(worker.plan, model):
            continue
        cfg = worker.node_cfg(model.node)
        source, contents = role_model(cfg, model.role), (CONTENTS, CONTENTS)
        if not model.trains:
            contents = (CONTENTS[:1], CONTENTS[:1])
        elif not whole:
            checkpoint = trained_group(cfg, model.role).checkpoint
            contents = (checkpoint.save_contents, checkpoint.load_contents)
        saved[name] = SavedModel(
            engine,
            worker.groups.get(model.ranks),
            source.path,
            *contents,
            source.lora_alpha if source.lora_rank else None,
            engine.hf_config_changes(),
            background.get(tuple(model.ranks)),
        )
    return saved


def _pools(worker: DAGWorker, background: Groups) -> dict[str, SavedModel]:
    found: dict[str, SavedModel] = {}
    for name, pool in worker.pools.items():
        ranks = worker.plan.links[name].ranks
        group, twin = worker.groups.get(ranks), background.get(tuple(ranks))
        found[f"agent_{pool.plan.agent}.pool"] = SavedModel(
            pool, group, None, CONTENTS[:1], CONTENTS[:1], background_group=twin, make_room=pool.make_room
        )
    return found
