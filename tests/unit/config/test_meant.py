"""What is said of a name that is none here: what is meant by it, not the nearest letters."""

import pytest

from siirl.cli import _commands, _parser, main
from siirl.config import load_config
from siirl.config.meant import COMMANDS, KEYS, VALUES, meant_key
from siirl.config.root import all_keys
from siirl.errors import ConfigError


@pytest.mark.parametrize(
    "said, meant",
    [
        ("data.lr=1e-5", "'actor_rollout_ref.actor.optim.lr'"),
        ("trainer.report_to=wandb", "'trainer.logger'"),
        ("algorithm.loss_type=grpo", "'actor_rollout_ref.actor.policy_loss.loss_mode'"),
        ("learning_rate=1e-5", "'actor_rollout_ref.actor.optim.lr'"),
        ("trainer.num_generations=8", "'actor_rollout_ref.rollout.n'"),
        ("trainer.resume_from_checkpoint=true", "'trainer.resume_from_path'"),
        ("trainer.bf16=true", "'actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype'"),
        ("rollout.vllm_tensor_parallel_size=2", "'actor_rollout_ref.rollout.tensor_model_parallel_size'"),
        ("use_peft=true", "'actor_rollout_ref.model.lora_rank'"),
        ("attn_implementation=flash_attention_2", "'actor_rollout_ref.model.attention_kernels'"),
        ("scale_rewards=false", "'algorithm.norm_adv_by_std_in_grpo'"),
        ("zero_stage=3", "'actor_rollout_ref.actor.strategy'"),
        ("algorithm.adv_estimator=ppo", "Here it is gae."),
        ("algorithm.adv_estimator=reinforce", "Here it is reinforce_plus_plus."),
        ("algorithm.adv_estimator=grop", "Did you mean 'grpo'?"),
        ("algorithm.adv_estimator=GRPO", "Did you mean 'grpo'?"),
        ("algorithm.adv_estimator=dr_grpo", "Here it is grpo, with actor_rollout_ref.actor.loss_agg_mode="),
        (
            "algorithm.adv_estimator=gspo",
            "Here it is grpo, with actor_rollout_ref.actor.policy_loss.loss_mode=gspo.",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dr_grpo", "Here it is vanilla, with "),
        ("actor_rollout_ref.actor.loss_agg_mode=bnpo", "Here it is token-mean."),
        ("peft_config=x", "'actor_rollout_ref.model.lora_rank'"),
        ("trainer.top_p=0.9", "'actor_rollout_ref.rollout.top_p'"),
        ("grpo.top_k=5", "'actor_rollout_ref.rollout.top_k'"),
        ("data.train_batch_sise=8", "'data.train_batch_size'"),
        ("actor_rolout_ref.actor.optim.lr=1", "'actor_rollout_ref.actor.optim.lr'"),
    ],
)
def test_a_name_of_another_trainer_is_answered_by_its_meaning(said, meant):
    with pytest.raises(ConfigError) as refused:
        load_config([said])
    assert meant in str(refused.value)


@pytest.mark.parametrize("said", ["trainer.foo", "trainer.disable_dropout", "trainer.vllm_mode", "foo"])
def test_a_group_that_both_stand_in_makes_no_name_near(said):
    with pytest.raises(ConfigError, match="has all keys"):
        load_config([f"{said}=1"])


def test_every_name_that_is_meant_is_one():
    assert {name for said in KEYS if (name := meant_key(said)) not in all_keys()} == set()
    for key, meant in VALUES.items():
        rule = all_keys()[key].rule
        for value, *more in (said.split() for said in meant.values()):
            assert value in {*rule.choices, *rule.synonyms}, key
            load_config(["algorithm.adv_estimator=grpo", *more])
        assert not set(meant) & {*rule.choices, *rule.later_choices, *rule.synonyms}, key
    known = _commands(_parser())
    assert set(COMMANDS.values()) <= {*known, "--version"} and not set(COMMANDS) & set(known)


def test_siirl_train_is_answered_by_run_and_the_version_is_told(capsys):
    assert main(["train", "data.train_batch_size=8"]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("siirl 0.")
