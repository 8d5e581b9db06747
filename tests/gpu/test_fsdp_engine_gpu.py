"""The FSDP engine on CUDA: variable-length kernels, NCCL, memory given back, Liger kernels."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_engine_cases as cases
from compiled_cases import SETTLED, graphs_after_each_step
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from recorded_cases import case_of, on_cuda, record_outcome
from train_engine_cases import Scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKEND = "cpu:gloo,cuda:nccl"
BF16 = ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16",)
LIGER = ("actor_rollout_ref.model.use_liger=True",)
FLASH_4 = ("actor_rollout_ref.model.attention_kernels=flash_attn_4",)
SHAPE = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "init_std": 0.1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(make_tiny_model_dir(tmp_path_factory.mktemp("gpu"), **SHAPE))


def train_on_cuda(rank: int, world: int, scenario: Scenario, path: str) -> cases.Outcome:
    return cases.run_scenario(replace(scenario, device=f"cuda:{rank}"), path)


def outcome_of(path: str, world: int = 1, overrides: tuple[str, ...] = (), size: int = 0) -> cases.Outcome:
    scenario = Scenario("", world, overrides=overrides, fsdp_size=size)
    return run_workers(train_on_cuda, world, scenario, path, deadline_s=120, backend=BACKEND)[0]


def assert_near(ours: cases.Outcome, theirs: cases.Outcome, log_prob: float, norm: float) -> None:
    assert (ours.log_prob - theirs.log_prob).abs().max() < log_prob
    assert (ours.entropy - theirs.entropy).abs().max() < log_prob
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=norm)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fp32_on_cuda_equals_plain_hf_on_cpu(model_dir, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    ours, theirs = outcome_of(model_dir, world), cases.run_reference(Path(model_dir))
    assert_near(ours, theirs, 1e-4, 1e-3)
    for name, weight in theirs.weights.items():
        assert (ours.weights[name] - weight).abs().mean() < 0.01 * cases.LR, name
    record_outcome(case_of("qwen3", on_cuda(Scenario("", world))), ours, theirs)


@pytest.mark.parametrize(
    "overrides, package",
    [((), "torch"), (LIGER, "liger_kernel"), (FLASH_4, "flash_attn"), (LIGER + FLASH_4, "flash_attn")],
    ids=["plain", "liger", "flash 4", "liger and flash 4"],
)
def test_bf16_with_variable_length_kernels_stays_near_fp32(model_dir, overrides, package):
    if not importlib.util.find_spec(package):
        pytest.skip(f"needs {package}")
    ours, theirs = outcome_of(model_dir, 1, BF16 + overrides), cases.run_reference(Path(model_dir))
    assert_near(ours, theirs, 0.2, 0.05)
    if not overrides:
        record_outcome(case_of("qwen3", on_cuda(Scenario("", 1)), dtype="bfloat16"), ours, theirs)


def offload_and_return(rank: int, world: int, path: str) -> None:
    scenario = Scenario("", world, overrides=BF16, device="cuda:0")
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(1))
    weights = {name: weight.clone() for name, weight in engine.export_weights()}
    moments = {
        name: moment.full_tensor().clone() for name, moment in engine.state_dict()["optimizer"].items()
    }
    num_bytes = sum(weight.nbytes for weight in weights.values())
    everything = {"params": True, "grads": True, "optimizer": True}
    before = torch.cuda.memory_allocated()
    for part, share in (("optimizer", 2), ("params", 1)):
        start = torch.cuda.memory_allocated()
        engine.offload(**{name: name == part for name in everything})
        engine.offload(**{name: name == part for name in everything})
        assert start - torch.cuda.memory_allocated() >= share * num_bytes
    with pytest.raises(AssertionError, match="call onload first"):
        cases.train_steps(engine, scenario, range(1))
    engine.onload(**everything)
    assert torch.cuda.memory_allocated() <= before + 1_000_000
    for name, weight in engine.export_weights():
        assert torch.equal(weight, weights[name]), name
    for name, moment in engine.state_dict()["optimizer"].items():
        assert torch.equal(moment.full_tensor(), moments[name]), name
    cases.train_steps(engine, scenario, range(1, 2))


def test_offload_gives_memory_back_and_restores_every_bit(model_dir):
    run_workers(offload_and_return, 1, model_dir, backend=BACKEND)


def test_other_lengths_and_numbers_of_shared_prompts_compile_nothing_after_some_steps(model_dir):
    compiled = (*BF16, "actor_rollout_ref.model.compile_layers=True")
    kept = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
    (found,) = run_workers(
        graphs_after_each_step, 1, model_dir, (*compiled, kept), "cuda:0", deadline_s=300, backend=BACKEND
    )
    assert found[0] > 0 and found[SETTLED] == found[-1]
