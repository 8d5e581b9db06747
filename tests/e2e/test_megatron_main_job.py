"""The main job with actor and reference on Megatron-Core: what FSDP does, step by step."""

import causal_lms
import pytest
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from siirl.checkpoint.export import export_adapter, export_hf

KL = "actor_rollout_ref.actor.use_kl_loss=True"
COMPARED = (
    "reward/score",
    "actor/loss",
    "actor/grad_norm",
    "actor/ref_kl",
    "actor/entropy",
    "rollout/response_length",
)


def megatron(role: str, **settings: object) -> list[str]:
    group = f"actor_rollout_ref.{role}"
    options = {"param_dtype": "float32", **settings}
    return [
        f"{group}.strategy=megatron",
        *(f"{group}.megatron.{key}={value}" for key, value in options.items()),
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def fsdp(inputs, tmp_path_factory):
    return run_job(1, overrides(inputs, tmp_path_factory.mktemp("fsdp"), KL))


def largest_difference(one, other) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    "axis",
    [
        "tensor_model_parallel_size",
        pytest.param("pipeline_model_parallel_size", marks=pytest.mark.slow),
        pytest.param("context_parallel_size", marks=pytest.mark.slow),
    ],
)
def test_an_actor_cut_in_two_and_a_data_parallel_reference_train_as_fsdp_does(inputs, fsdp, tmp_path, axis):
    sizes = {"tensor_model_parallel_size": 1, axis: 2}  # one that is set makes the reference's its own
    settings = [*megatron("actor", **sizes), *megatron("ref", tensor_model_parallel_size=1)]
    ours = run_job(2, overrides(inputs, tmp_path, KL, *settings))
    for name in COMPARED:
        assert len(ours.values(name)) == 3, name
        assert ours.values(name) == pytest.approx(fsdp.values(name), rel=1e-4, abs=2e-5), name
    once = pytest.approx(fsdp.values("flops/train"))
    assert ours.values("flops/train") == once, "a prompt that rows share is computed once"
    assert largest_difference(ours.weights(), fsdp.weights()) < 1e-4
    assert max(ours.values("actor/rollout_log_prob_diff")) < 1e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", ["olmo3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("granite", "gpt_oss"))]
)
def test_families_with_parts_of_their_own_train_as_under_fsdp(tmp_path, kind):
    """Norms over the heads of two ranks; numbers that scale; sinks and experts with biases."""
    inputs = Inputs.make(tmp_path / "inputs")
    sizes = {"max_position_embeddings": 512, "tie_word_embeddings": False}
    folder = make_tiny_model_dir(inputs.model, weights=False)
    causal_lms.write_model(folder, causal_lms.tiny_config(kind, **sizes))
    cut = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    settings = [*megatron("actor", **cut), *megatron("ref", **cut)]
    small = (KL, "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=2")
    ours = run_job(2, overrides(inputs, tmp_path / "ours", *small, *settings))
    theirs = run_job(1, overrides(inputs, tmp_path / "fsdp", *small))
    for name in COMPARED:
        assert ours.values(name) == pytest.approx(theirs.values(name), rel=1e-4, abs=2e-5), name
    assert largest_difference(ours.weights(), theirs.weights()) < 1e-4
    assert max(ours.values("actor/rollout_log_prob_diff")) < 1e-5


@pytest.mark.slow
def test_a_run_saved_under_tensor_parallelism_goes_on_under_pipeline_parallelism(inputs, fsdp, tmp_path):
    saves = [KL, "trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.async_save=True"]
    tp = [*megatron("actor", tensor_model_parallel_size=2), *megatron("ref", tensor_model_parallel_size=2)]
    pp = [*megatron("actor", pipeline_model_parallel_size=2), *megatron("ref", tensor_model_parallel_size=2)]
    run_job(2, overrides(inputs, tmp_path, *saves, *tp, "trainer.total_training_steps=2"))
    resumed = run_job(2, overrides(inputs, tmp_path, *saves, *pp))
    assert resumed.lines[-1]["step"] == 3
    for name in COMPARED:
        assert resumed.values(name)[-1] == pytest.approx(fsdp.values(name)[-1], rel=2e-4, abs=2e-5), name
    assert largest_difference(resumed.weights(), fsdp.weights()) < 2e-4


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_adapters_train_as_under_fsdp_go_on_in_another_layout_and_leave_alone(inputs, tmp_path):
    lora = (
        KL,
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    )
    fsdp = run_job(1, overrides(inputs, tmp_path / "fsdp", *lora))
    one = megatron("ref", tensor_model_parallel_size=1)
    layouts = {
        name: [*megatron("actor", **{f"{name}_model_parallel_size": 2}), *one]
        for name in ("tensor", "pipeline")
    }
    saves = [*lora, "trainer.save_freq=2"]
    ours = run_job(2, overrides(inputs, tmp_path / "ours", *saves, *layouts["tensor"]))
    for name in COMPARED:
        assert ours.values(name) == pytest.approx(fsdp.values(name), rel=1e-4, abs=2e-5), name
    assert largest_difference(ours.weights(), fsdp.weights()) < 1e-4
    assert ours.values("weight_sync/bytes") == pytest.approx(fsdp.values("weight_sync/bytes"))
    assert max(ours.values("actor/rollout_log_prob_diff")) < 1e-5

    checkpoints = tmp_path / "ours" / "checkpoints"
    start = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoints}/global_step_2")
    for name, settings in (("pipeline", layouts["pipeline"]), ("fsdp", [])):
        resumed = run_job(2, overrides(inputs, tmp_path / f"on_{name}", *lora, *start, *settings))
        assert resumed.lines[-1]["step"] == 3
        assert largest_difference(resumed.weights(), fsdp.weights()) < 2e-4
    whole = export_hf(checkpoints, tmp_path / "whole")
    stored = load_file(whole / "model.safetensors")
    alone = export_adapter(checkpoints, tmp_path / "adapter")
    merged = AutoPeftModelForCausalLM.from_pretrained(alone).merge_and_unload().state_dict()
    for name, tensor in ours.weights().items():
        assert (stored[name] - tensor).abs().max() < 1e-6, name
        assert (merged[name] - tensor).abs().max() < 1e-6, name
