"""Heads that vLLM has no kernel for, or would cut in silence, are refused by `siirl check` with the fix."""

import json

import pytest
from plan_cases import config

from siirl.cli import main
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.model_types import known_types
from siirl.compiler.vllm_models import CPU_HEAD_SIZES, SHARED_HEADS, WHY_NOT, why_not_in_vllm, why_not_on_cpu
from siirl.errors import NotSupportedError

VLLM, CPU = "actor_rollout_ref.rollout.name=vllm", "trainer.device=cpu"
HF = "actor_rollout_ref.rollout.name=hf"
SAMPLED = [kind for kind in known_types("fsdp") if kind not in WHY_NOT]


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
    assert "heads of 24 features" in why_not_on_cpu(raw)
    assert "heads of 24 features" in why_not_in_vllm(raw, config(VLLM, CPU), "actor")
    assert why_not_in_vllm(raw, config(VLLM), "actor") == why_not_in_vllm(raw, config(HF), "actor") == ""


def test_a_teacher_in_vllm_on_a_cpu_has_such_heads_too():
    cfg = config(CPU, "teacher.strategy=vllm", "actor_rollout_ref.actor.policy_loss.loss_mode=distill")
    raw = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    problem = why_not_in_vllm(raw, cfg, "scoring_teacher")
    assert "no kernel for heads of 16 features" in problem and problem.endswith("Set teacher.strategy=fsdp.")


@pytest.mark.parametrize("kind", SAMPLED)
def test_heads_that_vllm_would_cut_are_refused_on_every_device(kind):
    raw = {"model_type": kind, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 128}
    problem = why_not_in_vllm(raw, config(VLLM), "actor")
    if kind not in SHARED_HEADS:
        assert problem == ""
        return
    assert "with head_dim=128 it computes heads of 64 features" in problem and problem.endswith(f"Set {HF}.")
    for same in ({"head_dim": 64}, {"head_dim": None}, {"hidden_size": 512}):
        assert why_not_in_vllm(raw | same, config(VLLM), "actor") == ""


def test_the_command_says_so_in_one_message(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4})
    )
    keys = (f"actor_rollout_ref.model.path={tmp_path}", VLLM)
    assert main(["check", CPU, *keys]) == 2
    told = capsys.readouterr().err
    assert told.count("no kernel for heads of 16 features") == 1
