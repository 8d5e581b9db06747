"""The main job on real processes: equal on any number of ranks, exact resume, an export that loads."""

import json
import math

import pytest
import torch
from job_harness import Inputs, audited, overrides, run_job

from siirl.launch.run_folder import LOCK, LOGS, OWN
from siirl.launch.run_record import CONFIG_FILE

KL = "actor_rollout_ref.actor.use_kl_loss=True"
COMPARED = (
    "reward/score",
    "actor/loss",
    "actor/grad_norm",
    "actor/ref_kl",
    "actor/entropy",
    "rollout/response_length",
    "data/arithmetic/prompts",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def one_rank(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("one")
    return run_job(1, overrides(inputs, output, KL, "trainer.save_freq=2", "trainer.test_freq=2"))


def largest_difference(one, other) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("world_size", "more"),
    [
        (2, ["trainer.balance_batch=True"]),
        pytest.param(
            4,
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=True",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32",
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_the_same_on_any_number_of_ranks(inputs, one_rank, tmp_path, world_size, more):
    several = run_job(world_size, overrides(inputs, tmp_path, KL, *more))
    for name in COMPARED:
        assert len(several.values(name)) == 3
        assert several.values(name) == pytest.approx(one_rank.values(name), rel=2e-4, abs=2e-5), name
    assert largest_difference(several.weights(), one_rank.weights()) < 2e-4


def test_trainer_and_rollout_agree_on_log_probs(one_rank):
    assert max(one_rank.values("actor/rollout_log_prob_diff")) < 1e-5


def test_training_changes_the_weights_and_reports_what_it_did(inputs, one_rank):
    from safetensors.torch import load_file

    before = load_file(inputs.model / "model.safetensors")
    assert largest_difference(one_rank.weights(), before) > 1e-2
    assert [line["step"] for line in one_rank.lines] == [0, 1, 2, 3]
    assert all(
        math.isfinite(value) for line in one_rank.lines for value in line.values() if value is not None
    )
    assert len(one_rank.values("val/reward/mean")) == 3  # before training, after step 2, at the end
    last = one_rank.lines[-1]
    for name in (
        "perf/tokens_per_s",
        "time/step_s",
        "time/rollout_actor_s",
        "actor/lr",
        "actor/clip_fraction",
    ):
        assert name in last, name


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(inputs, one_rank, tmp_path):
    """It is killed as its last step is saved, and not yet told."""
    settings = [KL, "trainer.save_freq=2", "trainer.test_freq=2"]
    settings.append("trainer.ledger=rows")  # which changes no number
    told = run_job(1, overrides(inputs, tmp_path, *settings, "trainer.total_training_steps=2")).lines
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told[:-1]))
    resumed = run_job(1, overrides(inputs, tmp_path, *settings))
    assert [line["step"] for line in resumed.lines] == [0, 1, 2, 3]
    assert told[-1].items() > (resumed.lines[2] | {"time_s": told[-1]["time_s"]}).items()
    untold = {"perf/idle_s", "perf/idle_s_max", "time/checkpoint_s"}
    assert told[-1].keys() - resumed.lines[2].keys() == untold, "what the save itself took"
    assert "3 steps, 2 attempts, 24 prompts, 96 rows sampled, 96 trained" in audited(resumed)
    assert largest_difference(resumed.weights(), one_rank.weights()) == 0.0
    for name in COMPARED:
        assert resumed.values(name)[-1] == one_rank.values(name)[-1], name


def test_a_run_resumes_on_another_number_of_ranks(inputs, one_rank, tmp_path):
    settings = [KL, "trainer.save_freq=2", "trainer.ledger=tokens"]
    run_job(1, overrides(inputs, tmp_path, *settings, "trainer.total_training_steps=2"))
    resumed = run_job(2, overrides(inputs, tmp_path, *settings))
    assert "3 steps, 2 attempts, 24 prompts, 96 rows sampled, 96 trained" in audited(resumed)
    assert resumed.lines[-1]["step"] == 3
    assert largest_difference(resumed.weights(), one_rank.weights()) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("shared", [(2, 1), (1, 2)], ids=["ends", "begins"])
def test_a_run_resumes_where_ranks_share_rows_and_where_they_do_not(inputs, one_rank, tmp_path, shared):
    settings = [KL, "trainer.save_freq=2"]
    for steps, size in zip((2, 3), shared, strict=True):
        ranks = f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}"
        keys = overrides(inputs, tmp_path, *settings, ranks, f"trainer.total_training_steps={steps}")
        resumed = run_job(2, keys)
    assert [line["step"] for line in resumed.lines][-1] == 3
    assert largest_difference(resumed.weights(), one_rank.weights()) < 2e-4


def test_the_export_loads_in_transformers_and_a_checkpoint_exports_to_the_same(one_rank, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from siirl.checkpoint.export import export_hf

    exported = one_rank.output / "hf_model"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = torch.tensor([tokenizer.encode("max 3 7=")])
    assert torch.isfinite(model(ids).logits).all()
    export_hf(one_rank.output / "checkpoints" / "global_step_2", tmp_path / "later")
    AutoModelForCausalLM.from_pretrained(tmp_path / "later")
    samples = list((one_rank.output / "rollouts" / "train").glob("step_*.txt"))
    assert samples, "sampled rollouts are written as text"


@pytest.mark.slow
def test_the_adaptive_coefficient_of_a_kl_in_the_reward_survives_a_checkpoint(inputs, tmp_path):
    settings = [
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.target_kl=1e-4",
        "algorithm.kl_ctrl.horizon=100",
        "trainer.save_freq=2",
        "trainer.export_hf=False",
        "trainer.val_before_train=False",
    ]
    whole = run_job(1, overrides(inputs, tmp_path / "whole", *settings))
    run_job(1, overrides(inputs, tmp_path / "cut", *settings, "trainer.total_training_steps=2"))
    resumed = run_job(1, overrides(inputs, tmp_path / "cut", *settings))
    coefficients = whole.values("reward/kl_coef")
    assert coefficients[0] == 0.1
    assert coefficients[2] > coefficients[1], "KL above its target raises the coefficient"
    assert resumed.values("reward/kl_coef")[-1] == coefficients[-1]
    assert resumed.values("reward/score")[-1] == whole.values("reward/score")[-1]


def test_every_file_of_a_run_is_one_that_a_run_which_starts_over_removes_or_writes_anew(one_rank):
    anew = {LOCK, CONFIG_FILE, "job.json", "status", "errors", "checkpoints"}
    patterns = (*OWN, *LOGS)
    owned = {path for pattern in patterns for path in one_rank.output.glob(pattern)}
    for path in (path for path in one_rank.output.rglob("*") if path.is_file()):
        place = path.relative_to(one_rank.output)
        assert place.parts[0] in anew or owned & {path, *path.parents}, place
