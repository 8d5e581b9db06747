"""Jobs that train a reward model do what TRL's RewardTrainer does on the same pairs; policies learn by it."""

from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import trl_trainers
from job_harness import Finished, run_example
from test_given_responses_job import MINI, assert_means, by_trl, folder, train  # noqa: F401
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

PAIRS = ("actor_rollout_ref.rollout.n=2", "data.response_keys=[chosen,rejected]")
TP2 = (
    "reward_model.strategy=megatron",
    "reward_model.megatron.tensor_model_parallel_size=2",
    "reward_model.megatron.param_dtype=float32",
)


BY_TOKENS = ("reward_model.use_dynamic_bsz=True", "reward_model.ppo_max_token_len_per_gpu=64")
OWN_MINI_BATCH = (
    f"reward_model.ppo_mini_batch_size={MINI}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
)
"""No actor is trained: how its mini-batches would be cut is nobody's business."""


def keys(model: Path) -> tuple[str, ...]:
    return (
        "reward_model.enable=True",
        f"reward_model.model.path={model}",
        "reward_model.model.enable_gradient_checkpointing=False",
        "reward_model.optim.lr=1e-3",
        "reward_model.optim.weight_decay=0",
        "reward_model.fsdp_config.mixed_precision.param_dtype=float32",
    )


@pytest.fixture(scope="module")
def start(folder, tmp_path_factory) -> Path:  # noqa: F811
    """The model of the pairs with a new score head: both sides start from the same one."""
    out = tmp_path_factory.mktemp("start")
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    model.save_pretrained(out)
    for file in (folder / "model").iterdir():
        if not (out / file.name).exists() and not file.name.startswith("model"):
            (out / file.name).write_bytes(file.read_bytes())
    return out


@cache
def theirs(model: Path) -> trl_trainers.Trained:
    return by_trl("Reward", model, ("chosen=chosen", "rejected=rejected"))


@pytest.mark.parametrize(
    ("world", "more"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        (2, (*BY_TOKENS, *OWN_MINI_BATCH)),
        pytest.param(2, TP2, marks=pytest.mark.slow),
        pytest.param(2, ("reward_model.ulysses_sequence_parallel_size=2",), marks=pytest.mark.slow),
    ],
    ids=["fsdp on 1", "fsdp on 2, by tokens", "tp2", "fsdp, shared rows"],
)
def test_a_reward_model_learns_as_trls_does(folder, start, tmp_path, world, more):  # noqa: F811
    ours, by = train(folder, tmp_path, world, *PAIRS, *keys(start), *more), theirs(start)
    assert_means(ours, {"reward_model/loss": by.losses, "reward_model/grad_norm": by.grad_norms})
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf_reward")
    found = exported.state_dict()
    assert found.keys() == by.weights.keys() and len(found) > 10
    for name, tensor in found.items():
        assert float((tensor - by.weights[name]).abs().max()) < 2e-5, name
    assert not (tmp_path / "hf_model").exists() and exported.config.num_labels == 1


@pytest.mark.slow
def test_a_policy_learns_from_the_scores_of_a_reward_model_in_training(tmp_path):
    """In the first steps the reward model learns alone; then both do, and the policy gives right answers."""
    run_example(tmp_path, "reward_grpo", example="given_responses")
    out = tmp_path / "reward_grpo"
    found = Finished.read(out)
    assert found.values("agent_1/reward_model/reward_accuracy")[-1] > 0.9
    scores = found.values("agent_0/reward/score")
    assert len(scores) == 70 and scores[-1] > scores[0] + 1
    model = AutoModelForCausalLM.from_pretrained(out / "hf_model")
    tokenizer = AutoTokenizer.from_pretrained(out / "hf_model")
    rows = pq.read_table(tmp_path / "test.parquet").to_pylist()
    texts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, tokenize=False
    )
    first = model(tokenizer(texts, return_tensors="pt").input_ids).logits[:, -1].argmax(-1)  # of one length
    right = [row["reward_model"]["ground_truth"] for row in rows]
    said = tokenizer.batch_decode(first[:, None])
    assert sum(a == b for a, b in zip(said, right, strict=True)) > 0.7 * len(rows)


@pytest.mark.slow
def test_a_reward_model_learns_from_any_language_model(tmp_path):
    run_example(tmp_path, "reward", example="given_responses")
    found = Finished.read(tmp_path / "reward")
    accuracy = found.values("reward_model/reward_accuracy")
    assert accuracy[0] < 0.9 and sum(accuracy[-5:]) > 4.5
    losses = found.values("reward_model/loss")
    assert losses[0] == pytest.approx(0.69, abs=0.1) and losses[-1] < 0.3


@pytest.mark.slow
def test_a_run_that_goes_on_has_what_an_undisturbed_one_has(folder, tmp_path):  # noqa: F811
    """The head is new, so drawn; a checkpoint after the first of two steps."""
    made = (*PAIRS, *keys(folder / "model"))
    whole = train(folder, tmp_path / "whole", 1, *made)
    half = tmp_path / "half"
    train(folder, half, 1, *made, "trainer.total_training_steps=1", "trainer.save_freq=1")
    train(folder, half, 1, *made, "trainer.save_freq=1", "trainer.resume_mode=auto")
    one, other = (
        AutoModelForSequenceClassification.from_pretrained(x / "hf_reward") for x in (whole.output, half)
    )
    for (name, tensor), again in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, again), name
