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


SEVERAL = """
dag_id: several_rewards
nodes:
  - {node_id: rollout, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: functions, node_type: COMPUTE, node_role: REWARD, dependencies: [rollout], writes: [rule]}
  - {node_id: model, node_type: MODEL_INFERENCE, node_role: REWARD, dependencies: [rollout],
     writes: [helpful], placement: "1"}
  - node_id: total
    node_type: COMPUTE
    node_role: REWARD
    dependencies: [functions, model]
    reads: [rule, helpful]
    config: {weights: {arithmetic: {rule: 0.75, helpful: {weight: 0.25, low: -4, high: 4}}}}
  - {node_id: advantages, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [total]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantages]}
"""


def test_rewards_of_functions_and_of_a_model_on_its_own_rank_are_added_up(inputs, reward_model, tmp_path):
    dag = tmp_path / "several.yaml"
    dag.write_text(SEVERAL)
    keys = (
        f"dag.workflow_path={dag}",
        "reward_model.enable=True",
        f"reward_model.model.path={reward_model}",
        "reward_model.fsdp_config.mixed_precision.param_dtype=float32",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    )
    run = run_job(2, overrides(inputs, tmp_path / "out", *keys))
    rule, helpful = (run.values(f"reward/arithmetic/{name}/mean") for name in ("rule", "helpful"))
    expected = [0.75 * one + 0.25 * (other + 4) / 8 for one, other in zip(rule, helpful, strict=True)]
    assert run.values("reward/score") == pytest.approx(expected, abs=1e-5) and len(expected) == 2
    (val,) = run.values("val/reward/mean")[-1:]
    rule, helpful = (run.values(f"val/arithmetic/{name}/mean")[-1] for name in ("rule", "helpful"))
    assert val == pytest.approx(0.75 * rule + 0.25 * (helpful + 4) / 8, abs=1e-5)
