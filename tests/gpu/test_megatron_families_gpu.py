"""GLM-4-MoE and DeepSeek under Megatron on CUDA: routers of groups, compressed keys and values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import causal_lms
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import reference_on_disk, unequal_replicas
from recorded_cases import case_of, on_cuda, record_outcome
from safetensors.torch import load_file
from train_engine_cases import Scenario

from siirl.models.trained import OWN_TYPE

HAS_CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
BACKEND = "cpu:gloo,cuda:nccl" if HAS_CUDA else "gloo"
MEGATRON = "actor_rollout_ref.actor.megatron"
BF16 = f"{MEGATRON}.param_dtype=bfloat16"
GROUPED = f"+{MEGATRON}.override_transformer_config.moe_grouped_gemm=True"
SEQUENCE_PARALLEL = f"{MEGATRON}.sequence_parallel=True"
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
HEADS = {
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
}
MODELS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 32, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": {"q_lora_rank": 48, "routed_scaling_factor": 1.5, **HEADS},
    "deepseek_v2": HEADS,
}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("gpu")
    return {
        kind: str(causal_lms.write_model(root / kind, causal_lms.tiny_config(kind, **SIZES, **own)))
        for kind, own in MODELS.items()
    }


def scenario_of(kind: str, world: int, *overrides: str) -> Scenario:
    """Alone, or with tensor, sequence and expert parallelism, by the distributed optimizer."""
    sizes = (("tp", 2), ("ep", 2)) if world == 2 else ()
    overrides += (SEQUENCE_PARALLEL,) if world == 2 else ()
    return Scenario(kind, world, kind, overrides=overrides, strategy="megatron", sizes=sizes)


def trained(rank: int, world: int, scenario: Scenario, path: str) -> tuple[cases.Outcome, list[str], Any]:
    """The outcome, what ranks hold unequal copies of, and the biases of routers as they are exported."""
    scenario = replace(scenario, device=f"cuda:{rank}" if HAS_CUDA else "cpu")
    engine, _ = cases.build_engine(scenario, path)
    outcome = cases.train(engine, scenario)
    exported = {name: weight.to("cpu", copy=True) for name, weight in engine.export_weights()}
    biases = {name: weight for name, weight in exported.items() if name.endswith(OWN_TYPE)}
    return outcome, unequal_replicas(engine), biases


def outcome_of(scenario: Scenario, path: str) -> cases.Outcome:
    found = run_workers(trained, scenario.world, scenario, path, deadline_s=200, backend=BACKEND)
    ours, unequal, biases = found[0]
    assert unequal == []
    stored = load_file(Path(path) / "model.safetensors")
    expected = {name: stored[name] for name in stored if name.endswith(OWN_TYPE)}
    assert bool(expected) == (scenario.model != "deepseek_v2")
    assert biases.keys() == expected.keys()
    for name, bias in expected.items():
        assert biases[name].dtype == torch.float32 and torch.equal(biases[name], bias), name
    return ours


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_fp32_on_cuda_equals_plain_hf_on_cpu(model_dirs, kind, world):
    if HAS_CUDA and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    ours = outcome_of(scenario_of(kind, world), model_dirs[kind])
    theirs = reference_on_disk(model_dirs[kind], kind)
    assert (ours.log_prob - theirs.log_prob).abs().max() < 1e-4
    assert (ours.entropy - theirs.entropy).abs().max() < 1e-4
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-3)
    assert ours.grads.keys() == theirs.grads.keys()
    for name, grad in theirs.grads.items():
        assert (ours.grads[name] - grad).abs().max() < 1e-5, name
    record_outcome(case_of(kind, on_cuda(scenario_of(kind, world))), ours, theirs)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_bf16_with_variable_length_kernels_stays_near_fp32(model_dirs, kind, world):
    if HAS_CUDA and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    scenario = scenario_of(kind, world, BF16, GROUPED)
    ours = outcome_of(scenario, model_dirs[kind])
    theirs = reference_on_disk(model_dirs[kind], kind)
    gap = (ours.log_prob - theirs.log_prob).abs()  # a token may go to another expert
    assert gap.mean() < 0.05
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=0.1)
    record_outcome(case_of(kind, on_cuda(scenario), dtype="bfloat16"), ours, theirs)
