"""LoRA adapters on experts through the main job: rollouts, a resume on other ranks, and exports."""

from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job
from safetensors.torch import load_file

from siirl.checkpoint.export import export_adapter, export_hf

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
KEYS = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.deadline_s=300",
    f"{MODEL}.lora_rank=4",
    f"{ACTOR}.optim.lr=1e-2",
    f"+{ACTOR}.optim.override_optimizer_config={{eps:1e-6}}",
)
MEGATRON = (
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.megatron.param_dtype=float32",
    f"{ACTOR}.megatron.expert_model_parallel_size=2",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    make_tiny_model_dir(made.model, "qwen3_moe", tie=False, init_std=0.2, head_dim=32, mlp=48)
    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_on_experts_train_alike_everywhere_and_leave_as_they_are(inputs, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    alone = run_job(1, overrides(inputs, tmp_path / "alone", *KEYS), 300)
    sampled = (f"{ACTOR}.fsdp_config.expert_parallel_size=2", "actor_rollout_ref.rollout.name=vllm")
    dealt = run_job(2, overrides(inputs, tmp_path / "dealt", *KEYS, *sampled), 400)
    for name in ("actor/loss", "actor/grad_norm", "reward/score"):
        assert dealt.values(name) == pytest.approx(alone.values(name), rel=1e-4, abs=2e-5), name
    for run in (alone, dealt):
        assert max(run.values("actor/rollout_log_prob_diff")) < 1e-5
    mine, wanted = dealt.weights(), alone.weights()
    assert max(float((mine[name] - wanted[name]).abs().max()) for name in wanted) < 1e-4
    before = load_file(Path(inputs.model) / "model.safetensors")
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert float((wanted[expert] - before[expert]).abs().max()) > 1e-4

    from_first = (
        f"trainer.resume_from_path={dealt.output}/checkpoints/global_step_1",
        "trainer.resume_mode=resume_path",
        "trainer.resume_changed=true",
    )
    for name, (world, more) in {"alone again": (1, ()), "megatron": (2, MEGATRON)}.items():
        again = run_job(world, overrides(inputs, tmp_path / name, *KEYS, *from_first, *more), 300)
        gone_on = again.weights()
        assert max(float((gone_on[name] - mine[name]).abs().max()) for name in mine) < 1e-4, name

    checkpoint = dealt.output / "checkpoints" / "global_step_2"
    export_adapter(checkpoint, tmp_path / "adapter", "agent_0.actor")
    merged = load_file(export_hf(checkpoint, tmp_path / "merged", "agent_0.actor") / "model.safetensors")
    for name, weight in mine.items():
        assert float((merged[name] - weight).abs().max()) < 1e-6, name
    plain = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float32).eval()
    ids = torch.arange(24).unsqueeze(0) % 60
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(plain, tmp_path / "adapter")(ids).logits
        by_us = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(by_us, by_peft, atol=2e-5, rtol=0)
