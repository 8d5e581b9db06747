"""Every training engine: checkpoints move between rank counts, exports load in transformers."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.data.rows import take_rows

WHOLE = Scenario(
    "a large model whole",
    2,
    overrides=tuple(
        f"actor_rollout_ref.{role}.fsdp_config.reshard_after_forward=false" for role in ("actor", "ref")
    ),
    large=True,
)
PRECISION = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"


@pytest.fixture(scope="module")
def model_dir() -> str:
    root = Path(tempfile.mkdtemp(prefix="siirl-train-engine-"))
    return str(make_tiny_model_dir(root, hidden=64, init_std=0.15))


def save_after_two_steps(
    rank: int, world: int, path: str, folder: str, *keys: str
) -> dict[str, torch.Tensor]:
    scenario = Scenario("", world, overrides=keys)
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(2))
    dcp.save(engine.state_dict(), checkpoint_id=folder)
    cases.train_steps(engine, scenario, range(2, 3))
    return {name: weight.clone() for name, weight in engine.export_weights()}


def resume_last_step(rank: int, world: int, path: str, folder: str, *keys: str) -> dict[str, torch.Tensor]:
    scenario = Scenario("", world, overrides=keys)
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(1))  # whatever is there must be overwritten
    state = engine.state_dict()
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state)
    assert engine.version == 2
    cases.train_steps(engine, scenario, range(2, 3))
    return {name: weight.clone() for name, weight in engine.export_weights()}


def test_a_checkpoint_of_two_ranks_continues_on_two_one_and_three(model_dir, tmp_path):
    trained = run_workers(save_after_two_steps, 2, model_dir, str(tmp_path))[0]
    same = run_workers(resume_last_step, 2, model_dir, str(tmp_path))[0]
    for name in trained:
        assert torch.equal(trained[name], same[name]), name
    for world in (1, 3):
        other = run_workers(resume_last_step, world, model_dir, str(tmp_path))[0]
        for name in trained:
            torch.testing.assert_close(other[name], trained[name], atol=0.01 * cases.LR, rtol=0, msg=name)


@pytest.mark.slow
def test_muon_s_checkpoint_continues_bit_for_bit_and_nearly_so_on_another_number_of_ranks(
    model_dir, tmp_path
):
    muon = "actor_rollout_ref.actor.optim.name=muon"
    trained = run_workers(save_after_two_steps, 2, model_dir, str(tmp_path), muon)[0]
    same = run_workers(resume_last_step, 2, model_dir, str(tmp_path), muon)[0]
    other = run_workers(resume_last_step, 3, model_dir, str(tmp_path), muon)[0]
    for name in trained:
        assert torch.equal(trained[name], same[name]), name
        torch.testing.assert_close(other[name], trained[name], atol=0.01 * cases.LR, rtol=0, msg=name)


def export_and_score(rank: int, world: int, path: str, lora: bool) -> tuple[dict, dict, torch.Tensor]:
    overrides = ("actor_rollout_ref.model.lora_rank=4",) if lora else ()
    scenario = Scenario("", world, overrides=overrides)
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(2))
    weights = {name: weight.clone() for name, weight in engine.export_weights()}
    halves = {name: weight.dtype for name, weight in engine.export_weights(torch.bfloat16)}
    assert set(halves.values()) == {torch.bfloat16}
    assert list(engine.weight_specs()) == list(weights)
    assert engine.weight_specs() == {name: (tuple(w.shape), w.dtype) for name, w in weights.items()}
    mine = cases.rows_of_rank(rank, world, "even")
    scores = torch.zeros(cases.NUM_ROWS, cases.WIDTH)
    rows = take_rows(cases.sample_rows(7), mine)
    scores[mine] = engine.compute(rows, ("log_prob",), cases.TEMPERATURE)["log_prob"]
    dist.all_reduce(scores)
    return weights, halves, scores


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_exported_weights_load_in_transformers_and_give_the_same_log_probs(model_dir, tmp_path, lora):
    from transformers import AutoModelForCausalLM

    weights, _, scores = run_workers(export_and_score, 2, model_dir, lora)[0]
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected, _ = cases.reference_outputs(reloaded, cases.sample_rows(7))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def score_as_reference(rank: int, world: int, path: str) -> torch.Tensor:
    scenario = Scenario("", world)
    engine, _ = cases.build_engine(scenario, path, role="ref")
    mine = cases.rows_of_rank(rank, world, "even")
    columns = engine.compute(take_rows(cases.sample_rows(0), mine), ("log_prob",), cases.TEMPERATURE)
    assert list(columns.keys()) == ["log_prob"]
    assert engine.state_dict()["optimizer"] == {}
    with pytest.raises(AssertionError, match="not trained"):
        cases.train_steps(engine, scenario, range(1))
    scores = torch.zeros(cases.NUM_ROWS, cases.WIDTH)
    scores[mine] = columns["log_prob"]
    dist.all_reduce(scores)
    return scores


def test_a_reference_computes_log_probs_and_holds_no_optimizer(model_dir):
    from transformers import AutoModelForCausalLM

    scores = run_workers(score_as_reference, 2, model_dir)[0]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        expected, _ = cases.reference_outputs(model, cases.sample_rows(0))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def train_in_bf16(rank: int, world: int, path: str) -> cases.Outcome:
    return cases.run_scenario(Scenario("", world, overrides=(f"{PRECISION}=bfloat16",)), path)


def test_bf16_compute_with_fp32_master_weights_stays_near_fp32(model_dir):
    ours = run_workers(train_in_bf16, 2, model_dir)[0]
    theirs = cases.run_reference(Path(model_dir))
    gap = (ours.log_prob - theirs.log_prob).abs()
    assert 1e-5 < gap.max() < 0.2
    assert gap.mean() < 0.02
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=0.05)
    for name, weight in theirs.weights.items():
        assert ours.weights[name].dtype == torch.float32
        assert (ours.weights[name] - weight).abs().mean() < 0.5 * cases.LR, name


def train_nothing(rank: int, world: int, path: str) -> None:
    scenario = Scenario("", world)
    engine, _ = cases.build_engine(scenario, path)
    before = {name: weight.clone() for name, weight in engine.export_weights()}
    rows = take_rows(cases.sample_rows(0), cases.rows_of_rank(rank, world, "even"))
    rows["response_mask"] = torch.zeros_like(rows["response_mask"])
    metrics = engine.train_mini_batch(rows, cases.policy_loss, ("log_prob", "entropy"), 1.0)
    assert metrics.values()["skipped_step"] == 1.0
    assert engine.version == 0
    for name, weight in engine.export_weights():
        assert torch.equal(weight, before[name]), name


def test_a_mini_batch_without_trained_tokens_changes_nothing(model_dir):
    run_workers(train_nothing, 2, model_dir)


def go_back_after_a_forward(rank: int, world: int, path: str, scenario: Scenario) -> None:
    engine, _ = cases.build_engine(scenario, path)
    rows = take_rows(cases.sample_rows(0), cases.rows_of_rank(rank, world, "even"))

    def scores() -> torch.Tensor:
        return engine.compute(rows, ("log_prob",), cases.TEMPERATURE)["log_prob"]

    state = engine.state_dict()
    for part in ("model", "optimizer"):
        state[part] = {name: tensor.clone() for name, tensor in state[part].items()}
    first = scores()
    cases.train_steps(engine, scenario, range(1))
    assert not torch.equal(scores(), first)
    engine.load_state_dict(state)
    assert torch.equal(scores(), first)


@pytest.mark.parametrize("scenario", [Scenario("", 2), WHOLE])
def test_weights_that_are_loaded_right_after_a_forward_take_effect(model_dir, scenario):
    run_workers(go_back_after_a_forward, 2, model_dir, scenario)


@pytest.mark.parametrize(
    ("family", "scenario"), [("qwen3", Scenario("", 2)), ("qwen3_moe", Scenario("", 2)), ("qwen3", WHOLE)]
)
def test_a_frozen_model_takes_a_share_of_other_weights(tmp_path, family, scenario):
    sizes = {"hidden": 64, "init_std": 0.15, "tie": False, "experts": 5}
    paths = [str(make_tiny_model_dir(tmp_path / str(seed), family, seed=seed, **sizes)) for seed in (1, 2)]
    run_workers(cases.follow, 2, scenario, *paths)
