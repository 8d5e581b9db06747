"""A model that multiplies in FP8 trains as plain Hugging Face does with linear layers rounded by hand."""

import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import causal_lms
import pytest
import torch
import torch.distributed.checkpoint as dcp
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from float8_reference import with_reference_layers
from train_engine_cases import Outcome, Scenario

from siirl.models.families import types_with

FLOAT8 = types_with(lambda row: row.float8)

ACTOR = "actor_rollout_ref.actor"
FP8 = (f"{ACTOR}.fsdp_config.float8=True", "actor_rollout_ref.ref.fsdp_config.float8=True")
TOKEN_BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24")
LORA = (
    f"actor_rollout_ref.model.lora_rank={cases.LORA_RANK}",
    f"actor_rollout_ref.model.lora_alpha={cases.LORA_ALPHA}",
)
PLAIN = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
SCENARIOS = [
    Scenario("one rank", 1, overrides=FP8),
    Scenario("one row a micro-batch", 1, overrides=(*FP8, f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")),
    Scenario("no recomputation, biases", 1, "qwen2", overrides=(*FP8, *TOKEN_BUDGET, PLAIN)),
    Scenario("lora", 1, overrides=(*FP8, *LORA)),
    Scenario("two ranks, uneven rows", 2, split="uneven", overrides=(*FP8, *TOKEN_BUDGET)),
    Scenario("two ranks share rows", 2, sizes=(("cp", 2),), overrides=(*FP8, *TOKEN_BUDGET)),
    Scenario("two copies, lora", 2, fsdp_size=1, overrides=(*FP8, *LORA)),
]


@functools.cache
def model_dirs() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-float8-"))
    tiny = {"hidden": 64, "init_std": 0.15}
    return {
        "qwen3_tied": str(make_tiny_model_dir(root / "tied", tie=True, **tiny)),
        "qwen2": str(make_tiny_model_dir(root / "biases", "qwen2", tie=False, **tiny)),
    }


DISTINCT = tuple(range(cases.NUM_ROWS))
"""Rows that share no prompt: the gradient of a shared one is rounded once, not row by row."""


def run_distinct(rank: int, world: int, scenarios: list[Scenario], paths: dict[str, str]) -> Any:
    cases.SAME_PROMPT = DISTINCT
    return cases.run_scenarios(rank, world, scenarios, paths)


@functools.cache
def outcomes(world: int) -> dict[str, Outcome]:
    scenarios = [scenario for scenario in SCENARIOS if scenario.world == world]
    return run_workers(run_distinct, world, scenarios, model_dirs(), deadline_s=200)[0]


@functools.cache
def reference(model: str, lora: bool, rounds: bool = True, prompts: tuple[int, ...] = DISTINCT) -> Outcome:
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained

    def loaded(*args, **kwargs):
        found = load(*args, **kwargs)
        return with_reference_layers(found) if rounds else found

    with (
        patch.object(AutoModelForCausalLM, "from_pretrained", loaded),
        patch.object(cases, "SAME_PROMPT", prompts),
    ):
        return cases.run_reference(Path(model_dirs()[model]), "all-linear" if lora else "")


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.name)
def pair(request) -> tuple[Outcome, Outcome]:
    scenario = request.param
    return outcomes(scenario.world)[scenario.name], reference(scenario.model, "lora" in scenario.name)


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, relative to their size."""
    assert ours.keys() == theirs.keys()
    apart, size = (
        sum(float(x.double().square().sum()) for x in tensors)
        for tensors in ((ours[name] - theirs[name] for name in theirs), theirs.values())
    )
    return (apart / size) ** 0.5


def test_log_probs_are_those_of_rounded_layers_one_row_at_a_time(pair):
    ours, theirs = pair
    assert theirs.log_prob.abs().max() > 1
    torch.testing.assert_close(ours.log_prob, theirs.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-5, rtol=0)


def test_gradients_are_those_of_rounded_layers(pair):
    """Within what one number is worth that fp32 has on the other side of the middle between two."""
    ours, theirs = pair
    assert distance(ours.grads, theirs.grads) < 1e-4
    assert ours.grad_norms[0] == pytest.approx(theirs.grad_norms[0], rel=1e-4)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], abs=1e-5)


def test_rounding_is_what_moves_them():
    """The bounds above tell FP8 from fp32: by three digits."""
    rounded, plain = reference("qwen3_tied", False), reference("qwen3_tied", False, rounds=False)
    assert (rounded.log_prob - plain.log_prob).abs().mean() > 0.05
    assert distance(plain.grads, rounded.grads) > 0.1


def test_prompts_that_rows_share_give_the_same_log_probs_and_their_gradient_is_rounded_once():
    scenario, path = SCENARIOS[0], model_dirs()
    ours = run_workers(cases.run_scenarios, 1, [scenario], path)[0][scenario.name]
    theirs = reference(scenario.model, False, prompts=cases.SAME_PROMPT)
    torch.testing.assert_close(ours.log_prob, theirs.log_prob, atol=1e-5, rtol=0)
    assert distance(ours.grads, theirs.grads) < 0.05


def go_on(rank: int, world: int, path: str, folder: str) -> None:
    """A checkpoint of either kind is one of the other."""
    float8, plain = Scenario("", 1, overrides=FP8), Scenario("", 1)
    for number, (first, second) in enumerate(((float8, plain), (plain, float8))):
        one, _ = cases.build_engine(first, path)
        cases.train_steps(one, first, range(1))
        dcp.save(one.state_dict(), checkpoint_id=f"{folder}/{number}")
        other, _ = cases.build_engine(second, path)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{number}")
        other.load_state_dict(state)
        weights = dict(other.export_weights())
        for name, weight in one.export_weights():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, weights[name]), name
        found = [(engine.weight_specs(), engine.state_dict().keys()) for engine in (one, other)]
        assert found[0] == found[1]


def test_checkpoints_and_exports_are_those_of_plain_layers(tmp_path):
    run_workers(go_on, 1, model_dirs()["qwen3_tied"], str(tmp_path))


def types_are_right(rank: int, world: int, kinds: tuple[str, ...]) -> dict[str, float]:
    """Model type -> by how much log-probs of its engine are off, where that is more than a few roundings."""
    from transformers import AutoModelForCausalLM

    wrong = {}
    for kind in kinds:
        folder = Path(tempfile.mkdtemp(prefix="siirl-float8-type-"))
        causal_lms.write_model(folder, causal_lms.tiny_config(kind))
        engine, _ = cases.build_engine(Scenario("", 1, overrides=FP8), folder)
        rows = cases.sample_rows(0)
        found = engine.compute(rows, ("log_prob",), cases.TEMPERATURE)["log_prob"]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        plain = cases.reference_outputs(model, rows)[0]
        expected = cases.reference_outputs(with_reference_layers(model), rows)[0]
        gap = (found - expected).abs()
        assert (expected - plain).abs().mean() > 1e-6, f"{kind}: nothing was rounded"
        if gap.median() > 1e-5 or gap.mean() > 0.1 * (expected - plain).abs().mean():
            wrong[kind] = float(gap.max())
    return wrong


def test_some_models_multiply_so():
    assert run_workers(types_are_right, 1, ("llama", "opt", "glm4"), deadline_s=100)[0] == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_model_that_is_accepted_multiplies_so():
    assert run_workers(types_are_right, 1, FLOAT8, deadline_s=500)[0] == {}
