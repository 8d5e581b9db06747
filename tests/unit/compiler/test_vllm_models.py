"""Heads that vLLM has no kernel for, or would cut in silence, are refused by `siirl check` with the fix."""

import json

import pytest
from plan_cases import config

from siirl.cli import main
from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.compile import compile_plan, load_dag
from siirl.errors import NotSupportedError
from siirl.findings import refuse
from siirl.models.families import known_types, types_with
from siirl.models.sampled import CPU_HEAD_SIZES, why_not_in_vllm, why_not_on_cpu

SHARED_HEADS = types_with(lambda row: row.vllm.shares_hidden)
WHY_NOT = types_with(lambda row: row.vllm.why_not)

VLLM, CPU = "actor_rollout_ref.rollout.name=vllm", "trainer.device=cpu"
HF = "actor_rollout_ref.rollout.name=hf"
LATENT = types_with(lambda row: row.latent and not row.vllm.why_not)
STATES = types_with(lambda row: row.has_states)
SAMPLED = [kind for kind in known_types("fsdp") if kind not in (*WHY_NOT, *LATENT, *STATES)]


def compiled(folder, raw: dict, *keys: str) -> None:
    (folder / "config.json").write_text(json.dumps(raw))
    cfg = config(f"actor_rollout_ref.model.path={folder}", VLLM, *keys)
    compile_plan(load_dag(cfg), cfg, 1)


@pytest.mark.parametrize("size", range(8, 257, 8))
def test_heads_without_a_kernel_are_refused_on_a_cpu_and_only_there(tmp_path, size):
    model = {"model_type": "qwen3", "hidden_size": 256, "num_attention_heads": 4, "head_dim": size}
    compiled(tmp_path, model)
    compiled(tmp_path, model, CPU, HF)
    if size in CPU_HEAD_SIZES:
        compiled(tmp_path, model, CPU)
        return
    with pytest.raises(NotSupportedError) as caught:
        compiled(tmp_path, model, CPU)
    assert f"a qwen3 in vLLM: its attention on a CPU has no kernel for heads of {size} features, " in str(
        caught.value
    )
    assert str(caught.value).endswith(f"Set {HF}.")


@pytest.mark.parametrize("kind", SAMPLED)
def test_the_size_is_that_of_each_type_whatever_its_file_calls_it(kind):
    sizes = {"hidden_size": 96, "n_embd": 96, "num_attention_heads": 4, "n_head": 4}
    raw = {"model_type": kind, **sizes, "head_dim": None}
    assert "heads of 24 features" in why_not_on_cpu(raw, "bfloat16")
    assert "heads of 24 features" in why_not_in_vllm(raw, on_cpu=True, dtype="bfloat16")
    assert why_not_in_vllm(raw, on_cpu=False, dtype="bfloat16") == ""


@pytest.mark.parametrize("kind", LATENT)
def test_compressed_keys_and_values_have_a_kernel_of_one_size_on_a_cpu(kind):
    raw = {"model_type": kind, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert why_not_in_vllm(raw, on_cpu=True, dtype="bfloat16") == ""
    for other in ({"kv_lora_rank": 256}, {"qk_rope_head_dim": 32}):
        assert "kv_lora_rank=512 with qk_rope_head_dim=64 alone" in why_not_in_vllm(
            raw | other, on_cpu=True, dtype="bfloat16"
        )
        assert why_not_in_vllm(raw | other, on_cpu=False, dtype="bfloat16") == ""


DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@pytest.mark.parametrize(
    ("raw", "on_cpu", "dtype", "words"),
    [
        ({"model_type": "qwen3_next"}, True, "bfloat16", ""),
        (
            {"model_type": "qwen3_5_text"},
            True,
            "float32",
            "compute in bfloat16, not in rollout.dtype=float32",
        ),
        (
            {"model_type": "qwen3_5_text"} | DELTA | {"linear_key_head_dim": 64},
            True,
            "bfloat16",
            "64 or 128 features of a key and as many of a value, not for 64 with 128",
        ),
        ({"model_type": "granitemoehybrid", "mamba_n_groups": 1}, True, "float32", ""),
        ({"model_type": "granitemoehybrid", "mamba_n_groups": 2}, True, "float32", "with mamba_n_groups=2"),
        ({"model_type": "qwen3_5_text"}, False, "bfloat16", ""),
        *(
            ({"model_type": kind}, False, "bfloat16", "has been seen on a CPU alone")
            for kind in STATES
            if kind != "qwen3_5_text"
        ),
    ],
)
def test_states_are_sampled_where_that_was_seen(raw, on_cpu, dtype, words):
    delta = DELTA if raw["model_type"] != "granitemoehybrid" else {}
    problem = why_not_in_vllm(delta | raw, on_cpu=on_cpu, dtype=dtype)
    assert words in problem and bool(words) == bool(problem)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("deepseek_v3", {"attention_bias": True}, "with attention_bias=True it computes others"),
        ("deepseek_v3", {"rope_interleave": False}, "with rope_interleave=False it computes others"),
        ("gpt_oss", {"swiglu_limit": 0.7}, "with swiglu_limit=0.7 it computes others, it has 7.0"),
        (
            "gpt_oss",
            {"rope_parameters": {"rope_type": "default"}},
            "with rope_type=default it computes others",
        ),
        ("gpt_oss", {"rope_scaling": {"rope_type": "linear"}}, "with rope_type=linear it computes others"),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "it has them in each second one",
        ),
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"]}, ""),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn"}}, ""),
    ],
)
def test_what_vllm_reads_of_no_file_is_refused_where_a_file_says_otherwise(kind, values, words):
    problem = why_not_in_vllm({"model_type": kind, **values}, on_cpu=False, dtype="bfloat16")
    assert words in problem and bool(words) == bool(problem)


def test_a_teacher_in_vllm_on_a_cpu_has_such_heads_too(tmp_path):
    distill = "actor_rollout_ref.actor.policy_loss.loss_mode=distill"
    cfg = config(CPU, "teacher.strategy=vllm", distill, f"teacher.model.path={tmp_path}")
    raw = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(NotSupportedError, match=r"no kernel for heads of 16 .*Set teacher.strategy=fsdp\.$"):
        refuse(check_trained_model(cfg, "scoring_teacher", "the teacher"))


@pytest.mark.parametrize("kind", SAMPLED)
def test_heads_that_vllm_would_cut_are_refused_on_every_device(kind):
    raw = {"model_type": kind, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 128}
    problem = why_not_in_vllm(raw, on_cpu=False, dtype="bfloat16")
    if kind not in SHARED_HEADS:
        assert problem == ""
        return
    assert "with head_dim=128 it computes heads of 64 features" in problem
    for same in ({"head_dim": 64}, {"head_dim": None}, {"hidden_size": 512}):
        assert why_not_in_vllm(raw | same, on_cpu=False, dtype="bfloat16") == ""


def test_the_command_says_so_in_one_message(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4})
    )
    keys = (f"actor_rollout_ref.model.path={tmp_path}", VLLM)
    assert main(["check", CPU, *keys]) == 2
    told = capsys.readouterr().err
    assert told.count("no kernel for heads of 16 features") == 1
