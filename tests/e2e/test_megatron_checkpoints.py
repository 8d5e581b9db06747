"""Checkpoints of the main job under Megatron-Core: written in the background, resumed bit for bit."""

import shutil

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job
from safetensors.torch import load_file
from stored_checkpoints import assert_same_checkpoints
from transformers import AutoModelForCausalLM

from siirl.checkpoint import files
from siirl.checkpoint.convert import convert
from siirl.cli import main

ACTOR = "actor_rollout_ref.actor"
BACKGROUND = f"{ACTOR}.checkpoint.async_save=true"
EACH_STEP = ("trainer.save_freq=1", "trainer.val_before_train=false", "trainer.test_freq=-1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def megatron(dtype: str, **sizes: int) -> list[str]:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
    settings = {"param_dtype": dtype, "use_distributed_optimizer": True}
    settings |= {names[name]: size for name, size in sizes.items()}
    return [f"{ACTOR}.strategy=megatron", *(f"{ACTOR}.megatron.{k}={v}" for k, v in settings.items())]


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, megatron("bfloat16", pp=2)),
        pytest.param(2, megatron("float32", tp=2), marks=pytest.mark.slow),
        pytest.param(2, megatron("bfloat16"), marks=pytest.mark.slow),
        pytest.param(4, megatron("bfloat16", tp=2), marks=pytest.mark.slow),
        pytest.param(4, megatron("bfloat16", pp=2), marks=pytest.mark.slow),
        pytest.param(4, megatron("float32", tp=2, pp=2), marks=pytest.mark.slow),
    ],
    ids=["pp2", "tp2 fp32", "dp2", "tp2 dp2", "pp2 dp2", "tp2 pp2 fp32"],
)
def test_a_run_resumed_from_a_save_in_the_background_ends_as_the_one_that_went_on(
    inputs, tmp_path, world, settings
):
    """The first run saves in the background, each step; the second resumes from its step 1, saves in line."""
    settings = [*settings, *EACH_STEP, "trainer.total_training_steps=2"]
    first = run_job(world, overrides(inputs, tmp_path / "first", *settings, BACKGROUND))
    saved = tmp_path / "first" / "checkpoints"
    assert files.saved_steps(saved) == [2, 1] and len(first.values("time/checkpoint_stage_s")) == 2
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}/global_step_1"]
    second = run_job(world, overrides(inputs, tmp_path / "second", *settings, *resume))
    assert second.values("step") == [2] and not second.values("time/checkpoint_stage_s")
    for name in ("actor/loss", "actor/grad_norm", "reward/score"):
        assert second.values(name)[-1] == first.values(name)[-1], name
    last = [tmp_path / name / "checkpoints" / "global_step_2" for name in ("first", "second")]
    assert_same_checkpoints(*last, "agent_0.actor")
    assert all(torch.equal(first.weights()[name], value) for name, value in second.weights().items())


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    made = Inputs.make(tmp_path_factory.mktemp("experts"))
    make_tiny_model_dir(made.model, "qwen3_moe", tie=False, init_std=0.2)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 4])
def test_a_mixture_of_experts_resumes_exports_and_converts_to_what_was_trained(experts, tmp_path, steps):
    """On tensor and expert parallel ranks; the commands are those that a user types."""
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}
    layout = [*megatron("float32"), *(f"{ACTOR}.megatron.{name}={size}" for name, size in sizes.items())]
    settings = [*layout, *EACH_STEP, f"trainer.total_training_steps={steps}"]
    first = run_job(2, overrides(experts, tmp_path / "first", *settings))
    saved = tmp_path / "first" / "checkpoints"
    half, last = (saved / f"global_step_{step}" for step in (steps // 2, steps))
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={half}"]
    second = run_job(2, overrides(experts, tmp_path / "second", *settings, *resume))
    assert second.values("step") == list(range(steps // 2 + 1, steps + 1))
    for name in ("actor/loss", "actor/grad_norm", "reward/score"):
        assert second.values(name) == first.values(name)[steps // 2 :], name
    assert_same_checkpoints(last, tmp_path / "second" / "checkpoints" / last.name, "agent_0.actor")

    live = first.weights()
    assert sum(".experts." in name for name in live) == 2 * 4 * 3  # layers, experts, matrices
    begun = load_file(experts.model / "model.safetensors")
    assert all(not torch.equal(live[name], begun[name]) for name in live if ".experts." in name)
    out = {name: tmp_path / name for name in ("exported", "converted", "stored", "back")}
    assert main(["export", str(last), str(out["exported"])]) == 0
    assert main(["convert", str(last), str(out["converted"])]) == 0
    assert main(["convert", str(out["converted"]), str(out["stored"])]) == 0
    assert main(["convert", str(out["stored"]), str(out["back"])]) == 0
    for name in ("exported", "converted", "back"):
        found = load_file(out[name] / "model.safetensors")
        assert found.keys() == live.keys(), name
        assert all(torch.equal(found[key], value) for key, value in live.items()), name
    AutoModelForCausalLM.from_pretrained(out["exported"])  # its names and shapes are those of transformers


@pytest.mark.slow
def test_a_run_from_a_converted_checkpoint_needs_no_weight_files_and_is_the_same(inputs, tmp_path):
    few = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1")
    settings = [*megatron("float32", tp=2), *few, f"{ACTOR}.use_kl_loss=True"]
    usual = run_job(2, overrides(inputs, tmp_path / "usual", *settings))
    convert(inputs.model, tmp_path / "stored")
    bare = shutil.copytree(inputs.model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    group = "actor_rollout_ref.model.megatron"  # of actor and reference
    stored = [f"{group}.use_dist_checkpointing=True", f"{group}.dist_checkpointing_path={tmp_path}/stored"]
    path = f"actor_rollout_ref.model.path={bare}"
    ours = run_job(2, overrides(inputs, tmp_path / "ours", *settings, *stored, path))
    for name in ("actor/loss", "actor/grad_norm", "actor/ref_kl", "reward/score"):
        assert ours.values(name) == usual.values(name) and len(ours.values(name)) == 1, name
    assert all(torch.equal(usual.weights()[name], value) for name, value in ours.weights().items())
