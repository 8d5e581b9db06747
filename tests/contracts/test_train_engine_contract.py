"""Every training engine gives what plain Hugging Face and AdamW give, however the rows are cut."""

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import train_engine_cases as cases
from dist_harness import WorkerFailure, run_workers
from expert_cases import assert_equal_training, largest_gap, reference_on_disk
from fixtures_tiny import make_tiny_model_dir
from proven_models import TRAINING
from recorded_cases import case_of, record_outcome, type_of
from train_engine_cases import Outcome, Scenario

ACTOR = "actor_rollout_ref.actor"
TOKEN_BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24")
ROW = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",)
LORA = (
    f"actor_rollout_ref.model.lora_rank={cases.LORA_RANK}",
    f"actor_rollout_ref.model.lora_alpha={cases.LORA_ALPHA}",
)


def shared(name: str, world: int, ranks: int, *model: str, **options: Any) -> Scenario:
    """Ranks that share the tokens of a row (ulysses_sequence_parallel_size)."""
    return Scenario(name, world, *model, sizes=(("cp", ranks),), **options)


def whole(name: str, world: int, *model: str, overrides: tuple[str, ...] = (), **options: Any) -> Scenario:
    """A model that is no small one, and stays whole on every rank through a mini-batch."""
    keys = (*overrides, f"{ACTOR}.fsdp_config.reshard_after_forward=False")
    return Scenario(f"{name}, a large model whole", world, *model, overrides=keys, large=True, **options)


SCENARIOS = [
    Scenario("one rank", 1),
    Scenario("one rank, llama", 1, "llama"),
    Scenario("one row a micro-batch", 1, overrides=ROW),
    Scenario("token budget", 1, overrides=TOKEN_BUDGET),
    Scenario(
        "no recomputation", 1, overrides=("actor_rollout_ref.model.enable_gradient_checkpointing=False",)
    ),
    Scenario("lora", 1, overrides=LORA),
    Scenario("two ranks", 2, "qwen3_untied"),
    Scenario("two ranks, uneven rows", 2, split="uneven", overrides=TOKEN_BUDGET),
    Scenario("two ranks, one without rows", 2, "llama", split="first_rank"),
    Scenario("two ranks, five experts", 2, "qwen3_moe", split="uneven", overrides=TOKEN_BUDGET),
    shared("two ranks share rows", 2, 2, overrides=TOKEN_BUDGET),
    shared("two ranks share rows, lora", 2, 2, overrides=LORA),
    shared("two pairs share rows", 4, 2, "qwen3_untied", split="uneven", overrides=TOKEN_BUDGET),
    Scenario("two ranks, as a large model", 2, "qwen3_untied", overrides=ROW, large=True),
    whole("two ranks, five experts", 2, "qwen3_moe", split="uneven", overrides=TOKEN_BUDGET),
    whole("two ranks share rows", 2, overrides=TOKEN_BUDGET, sizes=(("cp", 2),)),
]
MORE = [
    Scenario("one rank, untied", 1, "qwen3_untied"),
    Scenario("two ranks, lora", 2, overrides=LORA),
    Scenario("four ranks", 4, split="uneven"),
    Scenario("two shards, two copies", 4, "qwen3_untied", fsdp_size=2),
    shared("two ranks share rows, five experts", 2, 2, "qwen3_moe", overrides=TOKEN_BUDGET),
    shared("four ranks share rows of two KV heads", 4, 4, "llama"),
    shared("two pairs share rows, one without", 4, 2, split="first_rank"),
    shared("two pairs share rows, each a copy", 4, 2, split="uneven", fsdp_size=2),
    whole("two ranks, one without rows", 2, "llama", split="first_rank"),
    whole("two ranks", 2, "qwen3_untied", overrides=ROW),
    whole("two ranks, lora", 2, overrides=LORA),
    whole("four ranks", 4, split="uneven", overrides=ROW),
    whole("two shards, two copies", 4, "qwen3_untied", fsdp_size=2, overrides=ROW),
]
"""What others have together, and no other scenario alone: slow."""
RANDOM_WORLD = 4


def random_scenarios(seed: int, num: int) -> list[Scenario]:
    """Models, layouts and options of ranks that share rows, together as nobody would choose them."""
    draw, found = random.Random(seed), []
    for number in range(num):
        cp = draw.choice((2, 4))
        keys = [
            f"actor_rollout_ref.model.enable_gradient_checkpointing={draw.random() < 0.5}",
            *draw.choice(((), TOKEN_BUDGET, ROW)),
        ]
        model = draw.choice(("qwen3_tied", "qwen3_untied", "llama", "qwen3_moe", "one_kv", "six_heads"))
        cp = 2 if model == "six_heads" else cp
        adapts = model != "qwen3_moe" and draw.random() < 0.3
        keys += LORA if adapts else ()
        size = draw.choice([size for size in (0, 2, 4) if size % cp == 0])
        split = draw.choice(("even", "uneven", "first_rank"))
        name = f"{number}: {model}, cp {cp}, {split}, fsdp_size {size}, {'lora' * adapts} {' '.join(keys)}"
        found.append(
            shared(name, RANDOM_WORLD, cp, model, split=split, fsdp_size=size, overrides=tuple(keys))
        )
    return found


TINY = {"hidden": 64, "init_std": 0.15}


@functools.cache
def model_dirs() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-train-engine-"))
    return {
        "qwen3_tied": str(make_tiny_model_dir(root / "tied", tie=True, **TINY)),
        "qwen3_untied": str(make_tiny_model_dir(root / "untied", tie=False, **TINY)),
        "llama": str(make_tiny_model_dir(root / "llama", "llama", tie=False, **TINY)),
        "one_kv": str(make_tiny_model_dir(root / "one", "qwen2", tie=False, kv_heads=1, **TINY)),
        "six_heads": str(
            make_tiny_model_dir(root / "six", tie=False, heads=6, kv_heads=3, head_dim=16, **TINY)
        ),
        "qwen3_moe": str(make_tiny_model_dir(root / "experts", "qwen3_moe", tie=False, experts=5, **TINY)),
    }


@functools.cache
def reference(model: str, lora: bool) -> Outcome:
    return reference_on_disk(model_dirs()[model], model, "all-linear" if lora else "")


@functools.cache
def outcomes(world: int, more: bool) -> dict[str, Outcome] | Exception:
    """What came of all scenarios of a size; an error is kept too, which a deadline may have passed for."""
    scenarios = [scenario for scenario in (MORE if more else SCENARIOS) if scenario.world == world]
    try:
        return run_workers(cases.run_scenarios, world, scenarios, model_dirs())[0]
    except WorkerFailure as failure:
        return failure


@pytest.fixture(
    params=[*SCENARIOS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda scenario: scenario.name,
)
def scenario(request) -> Scenario:
    return request.param


@pytest.fixture
def pair(scenario) -> tuple[Outcome, Outcome]:
    ours = outcomes(scenario.world, scenario in MORE)
    if isinstance(ours, Exception):
        raise ours
    return ours[scenario.name], reference(scenario.model, "lora" in scenario.name)


def test_log_probs_and_entropies_equal_plain_hf_one_row_at_a_time(pair):
    ours, theirs = pair
    assert theirs.log_prob.abs().max() > 1
    torch.testing.assert_close(ours.log_prob, theirs.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.prob_square, theirs.prob_square, atol=1e-6, rtol=0)


def test_gradients_equal_plain_hf(scenario, pair):
    ours, theirs = pair
    assert ours.grads.keys() == theirs.grads.keys()
    gap, name = largest_gap(ours.grads, theirs.grads)
    assert gap < 1e-6, name
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-4)
    part = "adapters" if "lora" in scenario.name else TRAINING
    record_outcome(case_of(type_of(model_dirs()[scenario.model]), scenario, part), ours, theirs)


def test_weights_after_the_steps_equal_plain_hf_and_adamw(pair):
    ours, theirs = pair
    assert ours.weights.keys() == theirs.weights.keys()
    gap, name = largest_gap(ours.weights, theirs.weights)
    assert gap < 0.01 * cases.LR, name


def test_shares_of_the_loss_add_up_to_the_loss_of_the_mini_batch(pair):
    ours, theirs = pair
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_share_rows_train_as_plain_hf_whatever_else_is_asked(seed):
    scenarios = random_scenarios(seed, 8)
    found = run_workers(cases.run_scenarios, RANDOM_WORLD, scenarios, model_dirs(), deadline_s=500)[0]
    for scenario in scenarios:
        theirs = reference(scenario.model, "lora" in scenario.name)
        try:
            assert_equal_training(found[scenario.name], theirs)
        except AssertionError as error:
            raise AssertionError(scenario.name) from error
