"""Scores of a frozen reward model through the main job."""

import pytest
from fixtures_tiny import make_tiny_model_dir, make_tiny_reward_model
from job_harness import Inputs, overrides, run_job


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_tiny_reward_model(tmp_path_factory.mktemp("reward"), vocab=80, init_std=0.2, seed=4)


def by_reward_model(world: int, inputs, reward_model, output, *more: str):
    keys = (
        "reward_model.enable=True",
        f"reward_model.model.path={reward_model}",
        "reward_model.fsdp_config.mixed_precision.param_dtype=float32",
        "reward_model.micro_batch_size_per_gpu=5",
        "trainer.val_before_train=True",
        "actor_rollout_ref.actor.optim.lr=3e-2",
    )
    arguments = overrides(inputs, output, *keys, *more)
    return run_job(world, [text for text in arguments if "custom_reward" not in text])


@pytest.mark.slow
def test_rows_that_are_balanced_over_ranks_score_the_same(inputs, reward_model, tmp_path):
    steps = "trainer.total_training_steps=2"
    one = by_reward_model(1, inputs, reward_model, tmp_path / "one", steps)
    tp = ("reward_model.strategy=megatron", "reward_model.megatron.tensor_model_parallel_size=2")
    exact = "reward_model.megatron.param_dtype=float32"
    shared = ("reward_model.ulysses_sequence_parallel_size=2",)
    for name, more in (("fsdp", ()), ("shared", shared), ("megatron", (*tp, exact))):
        two = by_reward_model(2, inputs, reward_model, tmp_path / name, steps, *more)
        for metric in ("reward/score", "reward/score_max", "val/reward/mean", "advantage/std"):
            assert two.values(metric) == pytest.approx(one.values(metric), abs=1e-4), (name, metric)


@pytest.mark.slow
def test_a_reward_model_trains_a_policy(inputs, reward_model, tmp_path):
    run = by_reward_model(1, inputs, reward_model, tmp_path, "trainer.total_training_steps=6")
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
  - node_id: judge
    node_type: MODEL_INFERENCE
    node_role: REWARD
    dependencies: [rollout]
    writes: [verdict]
    config: {judge.name: hf, model.path: JUDGE, judge.prompt: "Rate {response}", judge.pattern: "([0-9])",
             judge.max_tokens: 6, judge.default_score: 0.25}
  - node_id: total
    node_type: COMPUTE
    node_role: REWARD
    dependencies: [functions, model, judge]
    reads: [rule, helpful, verdict]
    config: {weights: {arithmetic: {rule: 0.75, helpful: {weight: 0.25, low: -4, high: 4}, verdict: 0.5}}}
  - {node_id: advantages, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [total]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantages]}
"""


def test_rewards_of_functions_a_model_and_a_judge_are_added_up(inputs, reward_model, tmp_path):
    dag = tmp_path / "several.yaml"
    judge = make_tiny_model_dir(tmp_path / "judge", vocab=70, init_std=0.2, seed=6)
    dag.write_text(SEVERAL.replace("JUDGE", str(judge)))
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
    for total, part in (("reward/score", "reward/arithmetic"), ("val/reward/mean", "val/arithmetic")):
        means = [run.values(f"{part}/{name}/mean") for name in ("rule", "helpful", "verdict")]
        expected = [0.75 * a + 0.25 * (b + 4) / 8 + 0.5 * c for a, b, c in zip(*means, strict=True)]
        assert len(expected) == 2 and run.values(total) == pytest.approx(expected, abs=1e-5)
    assert all(0 <= share <= 1 for share in run.values("reward/judge_malformed"))
    assert any(verdict != 0.25 for verdict in run.values("reward/arithmetic/verdict/mean"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_judge_in_vllm_answers_as_one_in_transformers(inputs, tmp_path):
    judge = make_tiny_model_dir(tmp_path / "judge", vocab=70, init_std=0.2, seed=6, head_dim=32, tie=False)
    scores = {}
    for name in ("hf", "vllm"):
        keys = (
            "reward_model.enable=True",
            f"reward_model.model.path={judge}",
            f"reward_model.judge.name={name}",
            "reward_model.judge.prompt='Rate {response}'",
            "reward_model.judge.pattern='([0-9])'",
            "reward_model.judge.max_tokens=8",
            "reward_model.judge.default_score=0.25",
            "actor_rollout_ref.rollout.max_num_seqs=32",
            "trainer.total_training_steps=2",
            "trainer.val_before_train=False",
            "trainer.deadline_s=240",
        )
        run = run_job(1, overrides(inputs, tmp_path / name, *keys), deadline_s=300)
        scores[name] = run.values("reward/score")
    assert len(scores["vllm"]) == 2 and scores["vllm"] == pytest.approx(scores["hf"], abs=1e-6)
    assert any(score != 0.25 for score in scores["hf"])
