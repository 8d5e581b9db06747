"""PPO through the main job: the same on any number of ranks and with the critic apart; resume; exports."""

import pytest
import torch
from job_harness import Inputs, overrides, run_job

PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.95",
    "critic.optim.lr=1e-2",
    "critic.cliprange_value=0.2",
    "critic.fsdp_config.mixed_precision.param_dtype=float32",
    "actor_rollout_ref.rollout.n=2",
)
KL = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100")
COMPARED = (
    "reward/score",
    "actor/loss",
    "actor/grad_norm",
    "critic/value_loss",
    "critic/explained_variance",
    "critic/grad_norm",
    "reward/kl_coef",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def one_rank(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("one")
    return run_job(1, overrides(inputs, output, *PPO, *KL, "trainer.save_freq=2"))


def placed_apart(folder) -> str:
    """The PPO template with the critic on a rank of its own."""
    from siirl.compiler.compile import TEMPLATES

    text = (TEMPLATES / "ppo.yaml").read_text()
    text = text.replace("node_role: CRITIC", "node_role: CRITIC, placement: '1'", 2)
    text = text.replace("node_role: CRITIC, placement: '1'\n", "node_role: CRITIC\n    placement: '1'\n")
    for role in ("ROLLOUT", "ACTOR", "REFERENCE"):
        text = text.replace(f"node_role: {role}\n", f"node_role: {role}\n    placement: '0'\n")
        text = text.replace(f"node_role: {role},", f"node_role: {role}, placement: '0',")
    path = folder / "apart.yaml"
    path.write_text(text)
    return f"dag.workflow_path={path}"


LAYOUTS = {
    "shared ranks": ("critic.ppo_micro_batch_size_per_gpu=3",),
    "shared rows": (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
    ),
    "critic apart": (),
}


@pytest.mark.parametrize(
    "layout",
    [name if name == "critic apart" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_ppo_is_the_same_on_two_ranks(inputs, one_rank, tmp_path, layout):
    more = LAYOUTS[layout] or (placed_apart(tmp_path),)
    two = run_job(2, overrides(inputs, tmp_path, *PPO, *KL, *more))
    for name in COMPARED:
        assert len(two.values(name)) == 3, name
        assert two.values(name) == pytest.approx(one_rank.values(name), rel=1e-3, abs=1e-4), name
    coefficients = one_rank.values("reward/kl_coef")
    assert coefficients[0] != coefficients[-1]


@pytest.mark.slow
def test_a_pipeline_parallel_critic_beside_a_tensor_parallel_actor_trains_as_under_fsdp(
    inputs, one_rank, tmp_path
):
    from transformers import AutoModelForTokenClassification

    megatron = [
        f"{group}.{key}"
        for group in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        for key in ("strategy=megatron", "megatron.param_dtype=float32")
    ]
    sizes = [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "critic.megatron.pipeline_model_parallel_size=2",
        "critic.megatron.use_distributed_optimizer=False",
    ]
    two = run_job(2, overrides(inputs, tmp_path, *PPO, *KL, *megatron, *sizes, "trainer.save_freq=2"))
    for name in COMPARED:
        assert two.values(name) == pytest.approx(one_rank.values(name), rel=1e-3, abs=1e-4), name
    ours, theirs = (
        AutoModelForTokenClassification.from_pretrained(run.output / "hf_critic") for run in (two, one_rank)
    )
    for name, weight in theirs.named_parameters():
        assert (weight - ours.get_parameter(name)).abs().max() < 1e-3, name


def test_ppo_resumes_bit_for_bit_and_exports_policy_and_critic(inputs, one_rank, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    checkpoint = one_rank.output / "checkpoints" / "global_step_2"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    resumed = run_job(1, overrides(inputs, tmp_path, *PPO, *KL, *resume))
    assert resumed.values("reward/kl_coef") == one_rank.values("reward/kl_coef")[2:]
    for folder, kind in (
        ("hf_model", AutoModelForCausalLM),
        ("hf_critic", AutoModelForTokenClassification),
    ):
        one, other = (kind.from_pretrained(run.output / folder) for run in (one_rank, resumed))
        for name, weight in one.named_parameters():
            assert torch.equal(weight, other.get_parameter(name)), name
    assert one.config.num_labels == 1


@pytest.mark.slow
def test_only_the_critic_learns_during_warmup(inputs, tmp_path):
    run = run_job(1, overrides(inputs, tmp_path, *PPO, "trainer.critic_warmup=2"))
    assert len(run.values("critic/grad_norm")) == 3
    assert [("actor/grad_norm" in line) for line in run.lines if "critic/grad_norm" in line] == [
        False,
        False,
        True,
    ]
