"""The worker of a service on a tiny model, whose server does not listen."""

from collections.abc import Sequence

import torch

from siirl.compiler.compile import compile_plan, load_dag
from siirl.config.load import load_config
from siirl.dag_worker.worker import DAGWorker
from siirl.observe.spans import Observer

MOST_RANK = 8


def service_of(model: str, folder: str, keys: Sequence[str]) -> DAGWorker:
    """The worker of a service; the caller has a process group."""
    cfg = load_config(
        [
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.model.lora_rank={MOST_RANK}",
            "data.max_prompt_length=32",
            "data.max_response_length=32",
            "actor_rollout_ref.rollout.dtype=float32",
            "trainer.device=cpu",
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
            "service.max_models=6",
            f"trainer.output_dir={folder}/run",
            *keys,
        ],
        "serve",
    )
    plan, _ = compile_plan(load_dag(cfg), cfg, 1)
    return DAGWorker(cfg, plan, 0, torch.device("cpu"), Observer())
