"""LoRA adapters on CUDA under both strategies, also on experts, against the numbers of peft and AdamW."""

from dataclasses import replace
from typing import Any

import expert_adapter_cases as experts
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import reference_on_disk, unequal_replicas
from fixtures_tiny import make_tiny_model_dir
from recorded_cases import case_of, on_cuda, record_outcome
from train_engine_cases import Scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKEND = "cpu:gloo,cuda:nccl"
PLAIN_OPTIMIZER = "actor_rollout_ref.actor.megatron.use_distributed_optimizer=False"
SHAPE = {"tie": False, "hidden": 64, "init_std": 0.15}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    made = {name: make_tiny_model_dir(root / name, name, layers=4, **SHAPE) for name in ("qwen2", "llama")}
    for name, num in {"qwen3_moe": 6, "mixtral": 5}.items():
        made[name] = make_tiny_model_dir(root / name, name, experts=num, **SHAPE)
    return {name: str(path) for name, path in made.items()}


def layout(name: str, world: int, model: str, *keys: str, strategy: str = "megatron", **sizes: int):
    keys = (*experts.SIZES, *keys)
    return Scenario(name, world, model, overrides=keys, strategy=strategy, sizes=tuple(sizes.items()))


DENSE = [
    layout("fsdp alone", 1, "qwen2", strategy="fsdp"),
    layout("fsdp, two ranks", 2, "llama", strategy="fsdp"),
    layout("megatron alone", 1, "qwen2"),
    layout("megatron alone, plain optimizer", 1, "llama", PLAIN_OPTIMIZER),
    layout("megatron tp2", 2, "qwen2", experts.SEQUENCE_PARALLEL, tp=2),
    layout("megatron pp2", 2, "llama", pp=2),
    layout("megatron cp2", 2, "llama", cp=2),
    layout("megatron tp2, pp2", 4, "qwen2", experts.SEQUENCE_PARALLEL, tp=2, pp=2),
]
EXPERTS = [
    Scenario("fsdp alone", 1, "mixtral", overrides=experts.ALL),
    Scenario("fsdp, down", 1, "qwen3_moe", overrides=experts.DOWN),
    Scenario("fsdp, two ranks", 2, "mixtral", split="uneven", overrides=experts.ALL),
    Scenario("fsdp, dealt", 2, "qwen3_moe", split="uneven", overrides=experts.ALL, sizes=experts.DEALT),
    experts.megatron("megatron alone", 1, "qwen3_moe"),
    experts.megatron("megatron ep2", 2, "qwen3_moe", ep=2),
    experts.megatron("megatron tp2", 2, "mixtral", *experts.ALL, experts.SEQUENCE_PARALLEL, tp=2, etp=2),
]


def train(
    rank: int, world: int, scenario: Scenario, path: str, start: dict[str, Any] | None
) -> cases.Outcome:
    """start: the adapters' first values; None: their own, which are peft's."""
    scenario = replace(scenario, device=f"cuda:{rank}")
    engine, _ = cases.build_engine(scenario, path)
    if start is not None:
        experts.put(engine, scenario, start)
    outcome = cases.train(engine, scenario)
    assert scenario.strategy != "megatron" or unequal_replicas(engine) == []
    return outcome


def outcome_of(scenario: Scenario, path: str, start: dict[str, Any] | None = None) -> cases.Outcome:
    if torch.cuda.device_count() < scenario.world:
        pytest.skip(f"needs {scenario.world} CUDA devices")
    return run_workers(train, scenario.world, scenario, path, start, deadline_s=180, backend=BACKEND)[0]


def assert_near(ours: cases.Outcome, theirs: cases.Outcome) -> None:
    assert (ours.log_prob - theirs.log_prob).abs().max() < 1e-4
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-3)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-4)
    assert ours.grads.keys() == theirs.grads.keys()
    assert max(float(grad.abs().max()) for grad in theirs.grads.values()) > 1e-3
    for name, grad in theirs.grads.items():
        assert (ours.grads[name] - grad).abs().max() < 1e-5, name
    for name, weight in theirs.weights.items():
        assert (ours.weights[name] - weight).abs().mean() < 0.01 * cases.LR, name


@pytest.mark.parametrize("scenario", DENSE, ids=lambda scenario: scenario.name)
def test_adapters_in_fp32_train_as_pefts_on_cpu(model_dirs, scenario):
    path = model_dirs[scenario.model]
    ours = outcome_of(scenario, path)
    theirs = reference_on_disk(path, scenario.model, "all-linear")
    assert_near(ours, theirs)
    record_outcome(case_of(scenario.model, on_cuda(scenario), "adapters"), ours, theirs)


@pytest.mark.parametrize("scenario", EXPERTS, ids=lambda scenario: scenario.name)
def test_adapters_on_experts_in_fp32_train_as_pefts_on_cpu(model_dirs, scenario):
    path, targets = model_dirs[scenario.model], experts.targets_of(scenario)
    start = experts.start_of(scenario.model, path, targets)
    ours = outcome_of(scenario, path, start)
    theirs = experts.reference(path, targets, start)
    assert_near(ours, theirs)
    record_outcome(case_of(scenario.model, on_cuda(scenario), "expert adapters"), ours, theirs)
