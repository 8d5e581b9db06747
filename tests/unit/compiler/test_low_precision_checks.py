"""FP8 in trainer and rollout: what goes together, what is refused and why, and what follows from it."""

import json

import pytest
from plan_cases import config

from siirl.cli import main
from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import Config, effect_warnings
from siirl.config.checks import check_config
from siirl.errors import ConfigError, NotSupportedError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FLOAT8 = f"{ACTOR}.fsdp_config.float8=True"
FP8 = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.max_log_prob_diff=0.1")
FP8_CACHE = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8")
DENSE = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
EXPERTS = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}


def checked(folder, *keys: str, **model) -> Config:
    """A run of a model, as `siirl check` sees it."""
    (folder / "config.json").write_text(json.dumps(model or DENSE))
    cfg = config(f"actor_rollout_ref.model.path={folder}", "trainer.device=cuda", *keys)
    check_config(cfg)
    compile_plan(load_dag(cfg), cfg, 1)
    return cfg


def test_the_reference_multiplies_as_the_actor_does(tmp_path):
    ref = f"{ACTOR.replace('actor_rollout_ref.actor', 'actor_rollout_ref.ref')}.fsdp_config.float8"
    cfg = checked(tmp_path, FLOAT8)
    assert cfg.actor_rollout_ref.ref.fsdp_config.float8
    assert not checked(tmp_path, FLOAT8, f"{ref}=False").actor_rollout_ref.ref.fsdp_config.float8
    assert not checked(tmp_path).actor_rollout_ref.ref.fsdp_config.float8


LORA = ("actor_rollout_ref.model.lora_rank=8",)


@pytest.mark.parametrize("keys", [(), LORA, (f"{ACTOR}.use_dynamic_bsz=True",), FP8, FP8_CACHE])
def test_products_in_fp8_go_with_these(tmp_path, keys):
    checked(tmp_path, FLOAT8, *keys)


HALF = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"


@pytest.mark.parametrize(
    ("keys", "model", "words"),
    [
        ((FLOAT8,), EXPERTS, r"float8=True for a qwen3_moe, .*mixtures of experts"),
        ((FLOAT8,), DENSE | {"hidden_size": 72}, r"float8=True with hidden_size=72: .*multiples of 16"),
        ((FLOAT8,), DENSE | {"head_dim": 9}, r"num_attention_heads \* head_dim=36"),
        ((FLOAT8, f"{HALF}=float32"), DENSE, r"param_dtype=float32: .*Set .*param_dtype=bfloat16"),
        (FP8, EXPERTS, r"quantization=fp8 for a qwen3_moe: only models without experts"),
        (
            (*FP8, f"{ROLLOUT}.engine_kwargs.vllm.quantization=fp8_per_block"),
            DENSE,
            r"engine_kwargs.vllm.quantization both say how",
        ),
    ],
)
def test_what_was_compared_with_nothing_is_refused(tmp_path, keys, model, words):
    with pytest.raises(NotSupportedError, match=words):
        checked(tmp_path, *keys, **model)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (FP8[:2], r"quantization=fp8 without a bound .*Set .*max_log_prob_diff, in nats"),
        ((*FP8, "trainer.device=cpu"), r"quantization=fp8 with trainer.device=cpu: .* on GPUs only"),
        ((*FP8, f"{ROLLOUT}.dtype=float32"), r"quantization=fp8 with .*dtype=float32: .*dtype=bfloat16"),
        (
            (f"{ROLLOUT}.max_log_prob_diff=0.1", f"{ACTOR}.policy_loss.loss_mode=dpo", f"{ROLLOUT}.n=2"),
            r"max_log_prob_diff=0.1 with .*loss_mode=dpo, which reads no log-probs of a rollout engine",
        ),
    ],
)
def test_rounded_weights_need_a_gpu_and_a_bound_that_can_be_seen(tmp_path, keys, words):
    with pytest.raises(ConfigError, match=words):
        checked(tmp_path, *keys)


@pytest.mark.parametrize("fp8", [FP8, FP8_CACHE], ids=["weights", "KV cache"])
def test_what_an_engine_in_fp8_samples_is_weighted_unless_the_ratio_is_to_it_anyway(tmp_path, fp8):
    cfg = checked(tmp_path, *fp8)
    assert cfg.actor_rollout_ref.actor.rollout_correction.weight == "truncate"
    to_engine = checked(tmp_path, *fp8, f"{ACTOR}.recompute_old_log_prob=False")
    assert to_engine.actor_rollout_ref.actor.rollout_correction.weight == "none"
    off = checked(tmp_path, *fp8, f"{ACTOR}.rollout_correction.weight=none")
    said = [
        [line for line in effect_warnings(one) if "likelier than the policy" in line]
        for one in (cfg, to_engine, off)
    ]
    assert [len(lines) for lines in said] == [0, 0, 1]
    assert "fp8" in said[2][0] and "truncate" in said[2][0]
    assert checked(tmp_path).actor_rollout_ref.actor.rollout_correction.weight == "none"


def test_a_judge_and_a_teacher_on_vllm_keep_their_weights(tmp_path):
    from siirl.config.roles import judge_config, scoring_config

    cfg = checked(tmp_path, *FP8)
    assert judge_config(cfg).actor_rollout_ref.rollout.quantization is None
    assert scoring_config(cfg).actor_rollout_ref.rollout.quantization is None


def test_vllm_is_told_to_round_weights_as_they_are_loaded(tmp_path):
    import torch
    from transformers import Qwen3Config

    from siirl.engines.rollout.vllm.arguments import engine_arguments

    cfg = checked(tmp_path, *FP8)
    arguments = engine_arguments(cfg, str(tmp_path), Qwen3Config(), 1, torch.device("cuda"))
    assert arguments["quantization"] == "fp8_per_channel"
    plain = checked(tmp_path, FP8[0])
    assert "quantization" not in engine_arguments(plain, "", Qwen3Config(), 1, torch.device("cuda"))


def test_the_check_says_so_on_the_command_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    assert main(["check", f"actor_rollout_ref.model.path={tmp_path}", FLOAT8, *FP8[:2]]) == 2
    said = capsys.readouterr()
    text = said.out + said.err
    assert "without a bound" in text
