"""The Megatron engine gives what plain Hugging Face and AdamW give, in every parallel layout."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Outcome, Scenario

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
PLAIN_OPTIMIZER = f"{MEGATRON}.use_distributed_optimizer=False"
SEQUENCE_PARALLEL = f"{MEGATRON}.sequence_parallel=True"
NO_RECOMPUTATION = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
OVERLAPS = (
    f"+{MEGATRON}.override_ddp_config.overlap_grad_reduce=True",
    f"+{MEGATRON}.override_ddp_config.overlap_param_gather=True",
)
TOKEN_BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24")
TINY = {"hidden": 64, "init_std": 0.15, "layers": 4}


def scenario(name: str, world: int, model: str = "qwen3_untied", split: str = "even", overrides=(), **sizes):
    return Scenario(
        name, world, model, split, tuple(overrides), strategy="megatron", sizes=tuple(sizes.items())
    )


FEW = [
    scenario("tp2", 2, "qwen3_tied", tp=2),
    scenario("dp2, uneven rows", 2, "llama", split="uneven", overrides=TOKEN_BUDGET),
    scenario("pp2, vpp2", 2, "qwen3_tied", overrides=TOKEN_BUDGET, pp=2, vpp=2),
    scenario("pp2, tp2, sequence parallel", 4, overrides=[SEQUENCE_PARALLEL], pp=2, tp=2),
]
SLOW = [
    scenario("one rank", 1),
    scenario("one rank, qwen2, plain optimizer", 1, "qwen2", overrides=[PLAIN_OPTIMIZER]),
    scenario("tp2, plain optimizer, token budget", 2, overrides=[PLAIN_OPTIMIZER, *TOKEN_BUDGET], tp=2),
    scenario("tp2, qwen2", 2, "qwen2", tp=2),
    scenario("dp2, one without rows", 2, split="first_rank"),
    scenario("dp2, plain optimizer", 2, "qwen3_tied", overrides=[PLAIN_OPTIMIZER]),
    scenario("tp4, two key-value heads", 4, "qwen3_tied", tp=4),
    scenario("tp2, dp2", 4, "llama", tp=2),
    scenario("pp2", 2, pp=2),
    scenario("pp2, tied", 2, "qwen3_tied", overrides=[PLAIN_OPTIMIZER, *TOKEN_BUDGET], pp=2),
    scenario("pp4", 4, "qwen2", pp=4),
    scenario("pp2, tp2", 4, "qwen3_tied", overrides=TOKEN_BUDGET, pp=2, tp=2),
    scenario("sequence parallel, tied", 2, "qwen3_tied", overrides=[SEQUENCE_PARALLEL], tp=2),
    scenario("pp2, dp2, uneven rows", 4, "qwen3_tied", split="uneven", overrides=TOKEN_BUDGET, pp=2),
    scenario("pp2, vpp2, dp2, one without rows", 4, split="first_rank", pp=2, vpp=2),
    scenario("no recomputation", 2, overrides=[NO_RECOMPUTATION], tp=2),
    scenario("overlapped reductions", 2, overrides=[*OVERLAPS, *TOKEN_BUDGET]),
]
SCENARIOS = [*FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@functools.cache
def model_dirs() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-megatron-engine-"))
    made = {
        "qwen3_tied": make_tiny_model_dir(root / "tied", tie=True, **TINY),
        "qwen3_untied": make_tiny_model_dir(root / "untied", tie=False, **TINY),
        "llama": make_tiny_model_dir(root / "llama", "llama", tie=False, **TINY),
        "qwen2": make_tiny_model_dir(root / "qwen2", "qwen2", tie=False, **TINY),
    }
    return {name: str(path) for name, path in made.items()}


@functools.cache
def reference(model: str) -> Outcome:
    return cases.run_reference(Path(model_dirs()[model]))


@functools.cache
def outcome(case: Scenario) -> Outcome:
    return run_workers(cases.run_scenarios, case.world, [case], model_dirs())[0][case.name]


@pytest.fixture(params=SCENARIOS, ids=lambda case: case.name)
def pair(request) -> tuple[Outcome, Outcome]:
    return outcome(request.param), reference(request.param.model)


def largest_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    return max((float((ours[name] - theirs[name]).abs().max()), name) for name in theirs)


def test_a_megatron_model_equals_plain_hf_and_adamw(pair):
    ours, theirs = pair
    assert theirs.log_prob.abs().max() > 1
    torch.testing.assert_close(ours.log_prob, theirs.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-5, rtol=0)
    assert ours.grads.keys() == theirs.grads.keys()
    gap, name = largest_gap(ours.grads, theirs.grads)
    assert gap < 1e-6, name
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-4)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    assert ours.weights.keys() == theirs.weights.keys()
    gap, name = largest_gap(ours.weights, theirs.weights)
    assert gap < 0.01 * cases.LR, name
