"""Scores of a frozen reward model through the main job."""

import pytest
from fixtures_tiny import make_tiny_reward_model
from job_harness import Inputs, overrides, run_job


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_tiny_reward_model(tmp_path_factory.mktemp("reward"), vocab=80, init_std=0.2, seed=4)


def test_a_reward_model_trains_a_policy(inputs, reward_model, tmp_path):
    keys = (
        "reward_model.enable=True",
        f"reward_model.model.path={reward_model}",
        "reward_model.fsdp_config.mixed_precision.param_dtype=float32",
        "reward_model.micro_batch_size_per_gpu=5",
        "trainer.total_training_steps=6",
        "trainer.val_before_train=True",
        "actor_rollout_ref.actor.optim.lr=3e-2",
    )
    run = run_job(1, [text for text in overrides(inputs, tmp_path, *keys) if "custom_reward" not in text])
    scores = run.values("reward/score")
    assert len(scores) == 6 and scores[-1] > scores[0] + 0.1
    assert run.values("reward/arithmetic/mean") == pytest.approx(scores, abs=1e-6)
    assert run.values("val/reward/mean") and set(run.values("reward/model_cut")) == {0.0}
    assert not (tmp_path / "hf_reward").exists()
