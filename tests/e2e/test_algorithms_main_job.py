"""ReMax, PF-PPO, filter plugins and the full KL through the main job, the same on one rank and on two."""

import pytest
from job_harness import Inputs, overrides, run_job

PLUGIN = '''
def most(ctx, rows):
    """Leave out the first response of each prompt."""
    return rows["row_id"] % 4 != 0
'''
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


def workflow(name: str, folder) -> list[str]:
    fp32 = "critic.fsdp_config.mixed_precision.param_dtype=float32"
    return {
        "remax": ["algorithm.adv_estimator=remax"],
        "pf_ppo": ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True", fp32],
        "filter": [filtered(folder)],
        "full_kl": [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.kl_loss_type=full"],
    }[name]


@pytest.mark.parametrize(
    "name",
    ["remax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pf_ppo", "filter", "full_kl"))],
)
def test_the_workflow_is_the_same_on_one_rank_and_on_two(inputs, tmp_path, name):
    more = workflow(name, tmp_path)
    one, two = (
        run_job(world, overrides(inputs, tmp_path / str(world), *more, "trainer.total_training_steps=2"))
        for world in (1, 2)
    )
    shown = {"pf_ppo": "resampling/distinct", "filter": "filter/kept", "full_kl": "actor/ref_kl"}.get(name)
    if shown:
        assert all(0 < share < 1 for share in one.values(shown)), one.values(shown)
    for metric in (*COMPARED, *([shown] if shown else [])):
        assert len(two.values(metric)) == 2, metric
        assert two.values(metric) == pytest.approx(one.values(metric), rel=1e-3, abs=1e-4), metric


@pytest.mark.slow
def test_the_full_kl_is_measured_from_the_same_model_after_a_resume(inputs, tmp_path):
    more = workflow("full_kl", tmp_path)
    whole = run_job(1, overrides(inputs, tmp_path / "whole", *more, "trainer.save_freq=2"))
    checkpoint = tmp_path / "whole" / "checkpoints" / "global_step_2"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    resumed = run_job(1, overrides(inputs, tmp_path / "resumed", *more, *resume))
    assert resumed.values("actor/ref_kl") == whole.values("actor/ref_kl")[2:]
