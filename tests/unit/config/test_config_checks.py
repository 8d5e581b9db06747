"""Keys that contradict each other are refused before anything starts; keys without effect are named."""

import functools
import itertools
import re
from dataclasses import replace
from typing import get_args, get_origin

import numpy as np
import pytest
import yaml

from siirl.config import Config, check_config, effect_warnings, load_config, with_overrides
from siirl.config.contradictions import CONTRADICTIONS
from siirl.config.resolve import get
from siirl.config.root import all_keys
from siirl.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
GOOD = (f"{ROLLOUT}.name=hf", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")


@functools.cache
def good() -> Config:
    return load_config(GOOD)


def configured(overrides: list[str]) -> Config:
    """GOOD with overrides, without composing again each time."""
    pairs = (text.partition("=") for text in overrides)
    return with_overrides(good(), {name: yaml.safe_load(value) for name, _, value in pairs})


DTYPE = {"fsdp": "fsdp_config.mixed_precision.param_dtype", "megatron": "megatron.param_dtype"}
REF = "actor_rollout_ref.ref"
WITH_KL = f"{ACTOR}.use_kl_loss=true"


@pytest.mark.parametrize("actor", DTYPE)
@pytest.mark.parametrize("ref", DTYPE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_computes_in_the_type_of_the_actor(actor, ref, dtype):
    keys = [WITH_KL, f"{ACTOR}.strategy={actor}", f"{REF}.strategy={ref}", f"{ACTOR}.{DTYPE[actor]}={dtype}"]
    cfg = configured(keys)
    assert get(cfg, f"{REF}.{DTYPE[ref]}") == dtype
    assert not any("difference of their rounding" in line for line in effect_warnings(cfg))
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    unlike = configured([*keys, f"{REF}.{DTYPE[ref]}={other}"])
    assert get(unlike, f"{REF}.{DTYPE[ref]}") == other
    said = [line for line in effect_warnings(unlike) if "difference of their rounding" in line]
    assert len(said) == 1 and f"{REF}.{DTYPE[ref]}={other}" in said[0] and dtype in said[0]


def test_the_reference_holds_its_weights_in_the_type_of_the_actor():
    cfg = configured([WITH_KL, f"{ACTOR}.fsdp_config.model_dtype=bfloat16"])
    assert cfg.actor_rollout_ref.ref.fsdp_config.model_dtype == "bfloat16"
    half = configured([WITH_KL, f"{ACTOR}.{DTYPE['fsdp']}=float16", f"{REF}.strategy=megatron"])
    assert half.actor_rollout_ref.ref.megatron.param_dtype == "bfloat16"
    assert any("difference of their rounding" in line for line in effect_warnings(half))


VERL_DPPO = {
    "clip_ratio": "clip_divergence",
    "clip_ratio_low": "clip_divergence_low",
    "clip_ratio_high": "clip_divergence_high",
    "clip_ratio_c": "ratio_cap",
}


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
def test_the_keys_that_verls_dppo_reads_are_refused_with_ours_by_name(loss):
    mode = f"{ACTOR}.policy_loss.loss_mode={loss}"
    theirs = [f"{ACTOR}.{name}=0.3" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")]
    with pytest.raises(ConfigError) as refused:
        check_config(configured([mode, *theirs, f"{ACTOR}.clip_ratio_c=20"]))
    for name, key in VERL_DPPO.items():
        assert f"{ACTOR}.{name}=" in str(refused.value) and f"policy_loss.{key} instead" in str(refused.value)
    prefix = f"{ACTOR}.policy_loss"
    cfg = configured([mode, f"{prefix}.clip_divergence=0.3", f"{prefix}.clip_divergence_high=0.4"])
    check_config(cfg)
    assert effect_warnings(cfg) == []
    picked = cfg.actor_rollout_ref.actor.policy_loss
    assert (picked.clip_divergence_low, picked.clip_divergence_high, picked.ratio_cap) == (0.3, 0.4, 20.0)


def test_a_sound_configuration_passes_without_warnings():
    cfg = good()
    check_config(cfg)
    assert effect_warnings(cfg) == []


def test_mini_batches_follow_the_batch_that_was_set_alone():
    cfg = configured(["data.train_batch_size=96", f"{ROLLOUT}.n=2"])
    check_config(cfg)
    assert cfg.actor_rollout_ref.actor.ppo_mini_batch_size == cfg.critic.ppo_mini_batch_size == 96


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=64"],
            ("does not divide", "ppo_mini_batch_size=50"),
        ),
        (
            ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=256"],
            ("ppo_mini_batch_size=256 is larger than data.train_batch_size=64", "=64"),
        ),
        ([f"{ROLLOUT}.n=1"], (f"{ROLLOUT}.n=1", "2 or more")),
        ([f"{ROLLOUT}.response_length=8"], ("response_length=8 differs from data.max_response_length=512",)),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1000"],
            ("ppo_max_token_len_per_gpu=1000", "512 + response 512 = 1024"),
        ),
        (
            [f"{ROLLOUT}.log_prob_use_dynamic_bsz=true", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=10"],
            (f"{ROLLOUT}.log_prob_max_token_len_per_gpu=10",),
        ),
        (
            ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=600"],
            ("overlong_buffer.len=600",),
        ),
        ([f"{ROLLOUT}.max_model_len=1023"], ("max_model_len=1023", "512", f"Remove {ROLLOUT}.max_model_len")),
        ([f"{ROLLOUT}.gpu_memory_utilization=0"], ("gpu_memory_utilization=0", "above 0 and at most 1")),
        ([f"{ROLLOUT}.gpu_memory_utilization=1.5"], ("gpu_memory_utilization=1.5",)),
        ([f"{ROLLOUT}.stop_token_ids=[2,-1]"], ("stop_token_ids=[2,-1]", "at least 0")),
        (["custom_reward_function.timeout_s=0"], ("timeout_s=0", "above 0")),
        (["reward_model.remote.timeout_s=0"], ("remote.timeout_s=0", "above 0")),
        ([f"{ROLLOUT}.multi_turn.tool_timeout_s=0"], ("tool_timeout_s=0", "above 0")),
        ([f"{ROLLOUT}.agent.endpoint.timeout_s=0"], ("endpoint.timeout_s=0", "above 0")),
        (
            ["trainer.trace=true", "trainer.trace_steps=[4,9]", "trainer.total_training_steps=3"],
            ("trace_steps=[4,9]", "total_training_steps=3"),
        ),
        (
            [f"{ACTOR}.policy_loss.{k}" for k in ("loss_mode=clip_cov", "clip_cov_lb=6", "clip_cov_ub=6")],
            ("clip_cov_lb=6", "clip_cov_ub=6"),
        ),
        ([f"{ROLLOUT}.reasoning_marks=[<think>]"], ("reasoning_marks=[<think>]", "what ends it")),
        ([f"{ROLLOUT}.top_k=0"], ("top_k=0", "-1")),
        ([f"{ROLLOUT}.val_kwargs.top_p=1.5"], ("val_kwargs.top_p=1.5",)),
        ([f"{ROLLOUT}.temperature=0"], ("temperature=1.0",)),
        ([f"{ROLLOUT}.do_sample=false"], ("do_sample=false", "the same")),
        ([f"{ROLLOUT}.val_kwargs.do_sample=true"], ("temperature=0 is greedy".replace("=", " "),)),
        ([f"{ROLLOUT}.val_kwargs.n=4"], ("all 4 greedy",)),
        ([f"{ROLLOUT}.top_k=1"], ("top_k=1", "the same", "top_k=-1")),
        (
            [f"{ROLLOUT}.val_kwargs.{k}" for k in ("n=4", "do_sample=true", "temperature=1.0", "top_k=1")],
            ("val_kwargs.top_k=1", "all 4 responses"),
        ),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.policy_loss.tau_pos=0"], ("tau_pos=0",)),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.policy_loss.tau_neg=-1"], ("tau_neg=-1",)),
        ([f"{ACTOR}.opsm_delta=0"], ("opsm_delta=0",)),
        (
            [f"{ACTOR}.rollout_correction.{k}" for k in ("reject=sum_k2", "reject_divergence=0")],
            ("reject_divergence=0",),
        ),
        ([f"{ACTOR}.clip_ratio_c=1"], ("above 1", "dual clip", "clip_ratio_c=3")),
        ([f"{ACTOR}.clip_ratio_low=2"], ("clip_ratio_low=2",)),
        ([f"{ACTOR}.use_cpgd_loss=true", f"{ACTOR}.policy_loss.loss_mode=gspo"], ("loss_mode=gspo", "short")),
        ([f"{ACTOR}.optim.betas=[0.9,1.0]"], ("betas=[0.9,1.0]", "below 1")),
        (
            ["critic.optim.betas=[0.9,1.0]", "algorithm.adv_estimator=gae"],
            ("critic.optim.betas", "below 1"),
        ),
        (
            [f"{ACTOR}.optim.name=muon", f"{ACTOR}.strategy=megatron"],
            ("name=muon with", "optim.name=adamw, or"),
        ),
        ([f"{ACTOR}.optim.min_lr_ratio=2"], ("min_lr_ratio=2",)),
        ([f"{ACTOR}.fsdp_config.fsdp_size=0"], ("fsdp_size=0",)),
        ([f"{ACTOR}.checkpoint.save_contents=[optimizer]"], ("save_contents=[optimizer]", "Add model")),
        (
            ["trainer.launcher=local", "trainer.nnodes=2"],
            ("trainer.nnodes=2 with trainer.launcher=local", "Set trainer.launcher=ray"),
        ),
        (["trainer.test_freq=5"], ("data.val_files names nothing", "val_before_train=false")),
        (["trainer.resume_mode=resume_path"], ("trainer.resume_from_path=",)),
        (["dag.workflow_path=a.yaml", "dag.custom_pipeline_fn=b.py:c"], ("a.yaml", "b.py:c", "only one")),
    ],
)
def test_contradictions_name_the_keys_and_the_fix(overrides, words):
    with pytest.raises(ConfigError) as caught:
        check_config(configured(overrides))
    for word in words:
        assert word in str(caught.value)


SEEDS = [name for name in all_keys() if name.endswith(("seed", "_seed")) and all_keys()[name].type is int]


@pytest.mark.parametrize("key", SEEDS)
def test_a_seed_is_a_number_that_every_generator_takes(key):
    """np.random.seed of vLLM and Megatron-Core takes 32 bits, default_rng no sign, torch 64 bits."""
    for seed in (0, 2**32 - 1):
        np.random.RandomState(seed)
        check_config(configured([f"{key}={seed}"]))
    for seed in (-1, 2**32):
        with pytest.raises(ConfigError, match=rf"{key}={seed}: must be at least 0 and at most 4294967295"):
            configured([f"{key}={seed}"])


NUMBERS = [name for name, one in all_keys().items() if float in (one.type, *get_args(one.type))]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_a_number_is_finite(value):
    assert len(NUMBERS) > 60
    for key in NUMBERS:
        pair = get_origin(all_keys()[key].type) is tuple
        with pytest.raises(ConfigError, match=f"{key}=.*expected a finite number"):
            configured([f"{key}=[0.5, {value}]" if pair else f"{key}={value}"])


def test_every_contradiction_names_keys_that_there_are():
    cfg = configured(["algorithm.adv_estimator=gae", "reward_model.enable=True"])
    for groups, rows in CONTRADICTIONS.items():
        for group, row in itertools.product(groups, rows):
            (problem,) = replace(row, holds=lambda _: True).problems(cfg, group)
            said, first = str(problem), re.match(r"[\w.]+", str(problem))[0]
            assert "{" not in said and any(key in said for key in all_keys()), said
            assert problem.breaks == ((first,) if first in all_keys() else ()), said


def test_all_contradictions_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        check_config(configured([f"{ROLLOUT}.n=1", f"{ACTOR}.clip_ratio_low=2", f"{ROLLOUT}.surplus=3"]))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{ROLLOUT}.enforce_eager=false", "rollout.name is hf"),
        (f"{ROLLOUT}.engine_kwargs.vllm.x=1", "rollout.name is hf"),
        ("algorithm.algorithm_name=ppo", "workflow"),
        (f"{ACTOR}.kl_loss_coef=0.1", "use_kl_loss is false"),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=4096", "use_dynamic_bsz is false"),
        (f"{ACTOR}.optim.num_cycles=1", "warmup_style is constant"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.use_kl_in_reward is false"),
        ("trainer.resume_from_path=/x", "resume_mode is auto"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "no reference model"),
        ("critic.cliprange_value=0.2", "grpo uses no critic"),
        (f"{ACTOR}.policy_drift_coeff=0.1", "loss_mode is vanilla"),
        ("algorithm.gamma=0.9", "adv_estimator is grpo"),
    ],
)
def test_a_key_without_effect_warns_and_names_itself(override, words):
    warnings = effect_warnings(configured([override]))
    assert len(warnings) == 1
    assert warnings[0].startswith(override.partition("=")[0].removesuffix(".x"))
    assert words in warnings[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1"],
        [
            f"{ACTOR}.use_dynamic_bsz=true",
            f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
            f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
        ],
        [f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.param_offload=true"],
        ["dag.workflow_path=own.yaml", "actor_rollout_ref.ref.fsdp_config.param_offload=true"],
        [f"{ACTOR}.param_offload=true"],
        [f"{ACTOR}.use_cpgd_loss=true", f"{ACTOR}.policy_drift_coeff=0.1"],
        ["algorithm.adv_estimator=own.py:fn", "algorithm.gamma=0.9"],
        [
            f"{ACTOR}.policy_loss.loss_mode=own.py:fn",
            f"{ACTOR}.clip_ratio_c=2",
            f"{ACTOR}.policy_loss.tau_pos=2",
        ],
    ],
)
def test_a_key_that_acts_does_not_warn(overrides):
    assert effect_warnings(configured(overrides)) == []


@pytest.mark.parametrize("key", ["profiler.enable=true", "trainer.save_freq=5", "trainer.test_freq=5"])
def test_keys_of_steps_are_named_where_a_run_only_validates(key):
    assert not effect_warnings(configured([key]))
    (line,) = effect_warnings(configured([key, "trainer.val_only=true"]))
    assert line == f"{key} has no effect: trainer.val_only is true, so there are no steps."


def test_passes_without_gradient_follow_the_micro_batches_of_the_actor():
    rollout, ref = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
    cfg = configured([f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=9000"])
    for group in (rollout, ref):
        assert get(cfg, f"{group}.log_prob_use_dynamic_bsz") is True
        assert get(cfg, f"{group}.log_prob_max_token_len_per_gpu") == 9000
    assert cfg.critic.use_dynamic_bsz is True and cfg.critic.ppo_max_token_len_per_gpu == 32768
    own = [f"{rollout}.log_prob_use_dynamic_bsz=false", "critic.use_dynamic_bsz=false"]
    cfg = configured([f"{ACTOR}.use_dynamic_bsz=true", *own])
    assert not (get(cfg, own[0].partition("=")[0]) or cfg.critic.use_dynamic_bsz)
    assert get(cfg, f"{ref}.log_prob_use_dynamic_bsz") and not configured([]).critic.use_dynamic_bsz


def test_a_default_that_is_not_the_one_of_the_loss_is_named():
    gspo, mode = f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode"
    (warning,) = effect_warnings(configured([gspo]))
    assert f"{mode}=token-mean is the default" in warning and f"Set {mode}=seq-mean-token-mean" in warning
    for chosen in ("token-mean", "seq-mean-token-mean"):
        assert effect_warnings(configured([gspo, f"{mode}={chosen}"])) == []


@pytest.mark.parametrize("name", ["temperature=0.6", "top_p=0.9", "top_k=20"])
def test_a_setting_of_validation_that_greedy_sampling_ignores_is_said(name):
    key = f"{ROLLOUT}.val_kwargs.{name}"
    (line,) = [one for one in effect_warnings(load_config([key])) if "val_kwargs" in one]
    assert f"{key} has no effect: {ROLLOUT}.val_kwargs.do_sample is false" in line
    sampled = [key, f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=0.6"]
    validated = load_config([*sampled, "data.val_files=[v.parquet]"])
    assert not [one for one in effect_warnings(validated) if "val_kwargs" in one]
    never = [one for one in effect_warnings(load_config(sampled)) if "val_kwargs" in one]
    assert never and all("the run does not validate" in one for one in never)
