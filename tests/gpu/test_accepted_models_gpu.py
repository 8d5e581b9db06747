"""Every type of model that `siirl check` accepts, small and random, computes on CUDA what HF does."""

from dataclasses import replace

import pytest
import torch
from accepted_cases import Bounds, results
from dist_harness import run_workers
from train_engine_cases import Scenario

from siirl.config.common import STRATEGIES
from siirl.models.families import known_types, types_with

VISION_MODELS = types_with(lambda row: row.sees_images)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEAR = Bounds(log_prob=1e-4, gradient=1e-5, norm=1e-3)
KINDS = [
    (kind, strategy)
    for strategy in STRATEGIES
    for kind in known_types(strategy)
    if kind not in VISION_MODELS  # test_vision_gpu.py
]


def on_each_device(rank: int, world: int, kind: str, scenario: Scenario) -> dict[str, str]:
    return results(rank, world, [kind], replace(scenario, device=f"cuda:{rank}"), NEAR)


@pytest.mark.parametrize(("kind", "strategy"), KINDS)
def test_each_computes_what_transformers_does(kind, strategy):
    scenario = Scenario("", 1, strategy=strategy)
    found = run_workers(on_each_device, 1, kind, scenario, deadline_s=100, backend="cpu:gloo,cuda:nccl")
    assert found == [{}]
