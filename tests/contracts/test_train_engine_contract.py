"""Every training engine gives what plain Hugging Face and AdamW give, however the rows are cut."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import largest_gap, reference_on_disk
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Outcome, Scenario

ACTOR = "actor_rollout_ref.actor"
TOKEN_BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24")
LORA = (
    f"actor_rollout_ref.model.lora_rank={cases.LORA_RANK}",
    f"actor_rollout_ref.model.lora_alpha={cases.LORA_ALPHA}",
)


def shared(name: str, world: int, ranks: int, *model: str, **options: Any) -> Scenario:
    """Ranks that share the tokens of a row (ulysses_sequence_parallel_size)."""
    return Scenario(name, world, *model, sizes=(("cp", ranks),), **options)


SCENARIOS = [
    Scenario("one rank", 1),
    Scenario("one rank, untied", 1, "qwen3_untied"),
    Scenario("one rank, llama", 1, "llama"),
    Scenario("one row a micro-batch", 1, overrides=(f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",)),
    Scenario("token budget", 1, overrides=TOKEN_BUDGET),
    Scenario(
        "no recomputation", 1, overrides=("actor_rollout_ref.model.enable_gradient_checkpointing=False",)
    ),
    Scenario("lora", 1, overrides=LORA),
    Scenario("two ranks", 2, "qwen3_untied"),
    Scenario("two ranks, uneven rows", 2, split="uneven", overrides=TOKEN_BUDGET),
    Scenario("two ranks, one without rows", 2, "llama", split="first_rank"),
    Scenario("two ranks, lora", 2, overrides=LORA),
    Scenario("two ranks, five experts", 2, "qwen3_moe", split="uneven", overrides=TOKEN_BUDGET),
    Scenario("four ranks", 4, split="uneven"),
    Scenario("two shards, two copies", 4, "qwen3_untied", fsdp_size=2),
    shared("two ranks share rows", 2, 2, overrides=TOKEN_BUDGET),
    shared("two ranks share rows, lora", 2, 2, overrides=LORA),
    shared("two ranks share rows, five experts", 2, 2, "qwen3_moe", overrides=TOKEN_BUDGET),
    shared("four ranks share rows of two KV heads", 4, 4, "llama"),
    shared("two pairs share rows", 4, 2, "qwen3_untied", split="uneven", overrides=TOKEN_BUDGET),
    shared("two pairs share rows, one without", 4, 2, split="first_rank"),
    shared("two pairs share rows, each a copy", 4, 2, split="uneven", fsdp_size=2),
]
TINY = {"hidden": 64, "init_std": 0.15}


@functools.cache
def model_dirs() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-train-engine-"))
    return {
        "qwen3_tied": str(make_tiny_model_dir(root / "tied", tie=True, **TINY)),
        "qwen3_untied": str(make_tiny_model_dir(root / "untied", tie=False, **TINY)),
        "llama": str(make_tiny_model_dir(root / "llama", "llama", tie=False, **TINY)),
        "qwen3_moe": str(make_tiny_model_dir(root / "experts", "qwen3_moe", tie=False, experts=5, **TINY)),
    }


@functools.cache
def reference(model: str, lora: bool) -> Outcome:
    return reference_on_disk(model_dirs()[model], model, "all-linear" if lora else "")


@functools.cache
def outcomes(world: int) -> dict[str, Outcome]:
    scenarios = [scenario for scenario in SCENARIOS if scenario.world == world]
    return run_workers(cases.run_scenarios, world, scenarios, model_dirs())[0]


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.name)
def pair(request) -> tuple[Outcome, Outcome]:
    scenario = request.param
    return outcomes(scenario.world)[scenario.name], reference(scenario.model, "lora" in scenario.name)


def test_log_probs_and_entropies_equal_plain_hf_one_row_at_a_time(pair):
    ours, theirs = pair
    assert theirs.log_prob.abs().max() > 1
    torch.testing.assert_close(ours.log_prob, theirs.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.prob_square, theirs.prob_square, atol=1e-6, rtol=0)


def test_gradients_equal_plain_hf(pair):
    ours, theirs = pair
    assert ours.grads.keys() == theirs.grads.keys()
    gap, name = largest_gap(ours.grads, theirs.grads)
    assert gap < 1e-6, name
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-4)


def test_weights_after_three_steps_equal_plain_hf_and_adamw(pair):
    ours, theirs = pair
    assert ours.weights.keys() == theirs.weights.keys()
    gap, name = largest_gap(ours.weights, theirs.weights)
    assert gap < 0.01 * cases.LR, name


def test_shares_of_the_loss_add_up_to_the_loss_of_the_mini_batch(pair):
    ours, theirs = pair
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
