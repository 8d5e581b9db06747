"""The service of a worker, whose server does not listen, for the tests of this folder."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fixtures_tiny import make_tiny_model_dir

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


@pytest.fixture(scope="module")
def service(request, tmp_path_factory):
    """The service of a worker, whose server does not listen. KEYS of the test's module are set."""
    folder = tmp_path_factory.mktemp("service")
    model = make_tiny_model_dir(folder / "model", init_std=0.1)
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    worker = service_of(str(model), str(folder), getattr(request.module, "KEYS", ()))
    yield worker.nodes["service"].services["service"]
    worker.close()
    dist.destroy_process_group()


@pytest.fixture
def tenants(service):
    yield service.tenants
    for session in ("a", "b", "c"):
        service.tenants.release(session)
