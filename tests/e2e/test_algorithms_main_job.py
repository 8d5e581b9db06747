"""ReMax, PF-PPO, GDPO, masks, filters, the full KL through the main job: the same on one rank and on two."""

import pytest
from job_harness import Inputs, overrides, run_job

PLUGIN = '''
def most(ctx, rows):
    """Leave out the first response of each prompt."""
    return rows["row_id"] % 4 != 0
'''
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = sum(character.isdigit() for character in solution_str)
    return {"score": digits / 8, "right": float(ground_truth in solution_str), "odd": digits % 2}
"""
ACTOR = "actor_rollout_ref.actor"
COMPARED = ("actor/loss", "actor/grad_norm", "reward/score")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def filtered(folder) -> str:
    """GRPO whose training leaves out rows, by a plugin."""
    from siirl.compiler.compile import TEMPLATES

    (folder / "plugin.py").write_text(PLUGIN)
    text = (TEMPLATES / "grpo.yaml").read_text()
    plugin = f"{{fn: '{folder}/plugin.py:most', reads: [row_id]}}"
    text = text.replace("node_id: actor_train\n", f"node_id: actor_train\n    filter_plugin: {plugin}\n")
    (folder / "filtered.yaml").write_text(text)
    return f"dag.workflow_path={folder / 'filtered.yaml'}"


def gdpo(folder) -> list[str]:
    """Several rewards, VESPO, and every term that leaves tokens out of a policy loss or weighs them."""
    (folder / "rewards.py").write_text(REWARDS)
    correction = f"{ACTOR}.rollout_correction"
    return [
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_rewards={score: 1.0, right: 2.0, odd: 0.5}",
        f"custom_reward_function.path={folder / 'rewards.py'}",
        f"{ACTOR}.policy_loss.loss_mode=vespo",
        f"{ACTOR}.loss_agg_mode=prompt-mean",
        f"{ACTOR}.opsm_delta=0.001",
        f"{ACTOR}.top_entropy_quantile=0.5",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.1",
        f"{ACTOR}.kl_loss_weighted=True",
        f"{correction}.weight=filter",
        f"{correction}.reject=mean_k3",
        f"{correction}.reject_divergence=0.01",
    ]


def workflow(name: str, folder) -> list[str]:
    fp32 = "critic.fsdp_config.mixed_precision.param_dtype=float32"
    return {
        "remax": ["algorithm.adv_estimator=remax"],
        "pf_ppo": ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True", fp32],
        "filter": [filtered(folder)],
        "gdpo": gdpo(folder),
        "optimal_token_baseline": ["algorithm.adv_estimator=optimal_token_baseline"],
        "maxrl": ["algorithm.adv_estimator=maxrl", f"{ACTOR}.policy_loss.loss_mode=dro"],
        "full_kl": [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.kl_loss_type=full"],
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["remax", "gdpo", "maxrl", "optimal_token_baseline", "pf_ppo", "filter", "full_kl"]
)
def test_the_workflow_is_the_same_on_one_rank_and_on_two(inputs, tmp_path, name):
    more = workflow(name, tmp_path)
    one, two = (
        run_job(world, overrides(inputs, tmp_path / str(world), *more, "trainer.total_training_steps=2"))
        for world in (1, 2)
    )
    shown = {"pf_ppo": "resampling/distinct", "filter": "filter/kept", "full_kl": "actor/ref_kl"}
    shown = (shown | {"gdpo": "actor/high_entropy"}).get(name)
    if name == "filter":
        kept, dropped = one.values(shown), one.values("data/arithmetic/filtered")
        assert [32 * (1 - share) for share in kept] == pytest.approx(dropped)
        assert two.values("data/arithmetic/filtered") == dropped
    if shown:
        assert all(0 < share < 1 for share in one.values(shown)), one.values(shown)
    for metric in (*COMPARED, *([shown] if shown else [])):
        assert len(two.values(metric)) == 2, metric
        assert two.values(metric) == pytest.approx(one.values(metric), rel=1e-3, abs=1e-4), metric


@pytest.mark.slow
def test_the_optimal_token_baseline_is_that_of_all_words_where_ranks_have_parts_of_them(inputs, tmp_path):
    more = [*workflow("optimal_token_baseline", tmp_path), "trainer.total_training_steps=2"]
    tp2 = [
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.param_dtype=float32",
    ]
    one = run_job(1, overrides(inputs, tmp_path / "one", *more))
    two = run_job(2, overrides(inputs, tmp_path / "two", *more, *tp2))
    for metric in (*COMPARED, "advantage/std"):
        assert two.values(metric) == pytest.approx(one.values(metric), rel=1e-3, abs=1e-4), metric


@pytest.mark.slow
def test_the_full_kl_is_measured_from_the_same_model_after_a_resume(inputs, tmp_path):
    more = workflow("full_kl", tmp_path)
    whole = run_job(1, overrides(inputs, tmp_path / "whole", *more, "trainer.save_freq=2"))
    checkpoint = tmp_path / "whole" / "checkpoints" / "global_step_2"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    resumed = run_job(1, overrides(inputs, tmp_path / "resumed", *more, *resume))
    assert resumed.values("actor/ref_kl") == whole.values("actor/ref_kl")[2:]
