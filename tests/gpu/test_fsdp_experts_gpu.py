"""Mixtures of experts under FSDP2 on CUDA: torch's grouped product, and training against Hugging Face."""

import os
import subprocess
import sys
from dataclasses import replace

import expert_kernels_cases
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import reference_on_disk
from fixtures_tiny import make_tiny_model_dir
from gpu_share import VLLM_SHARE
from job_harness import ROOT, Finished, Inputs, overrides
from proven_models import record
from recorded_cases import case_of, on_cuda, record_outcome
from train_engine_cases import Scenario

from siirl.engines.train.experts.hf_experts import grouped_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16",)
MODELS = {"qwen3_moe": 5, "mixtral": 4, "gpt_oss": 4}
"""Model -> experts of a layer."""


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> dict[str, str]:
    root, shape = tmp_path_factory.mktemp("experts"), {"tie": False, "hidden": 64, "init_std": 0.15}
    return {
        name: str(make_tiny_model_dir(root / name, name, experts=num, **shape))
        for name, num in MODELS.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(5, 0, 9, 1), (0, 0, 15, 0), (128, 3, 0, 77, 1, 1, 640, 14), (1,) * 128])
def test_a_grouped_product_equals_that_of_each_expert(counts, dtype):
    draw = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=draw, device="cuda").to(dtype).requires_grad_()

    x_SD, weight_EOD = drawn(sum(counts), 64), drawn(len(counts), 96, 64)
    ends_E = torch.tensor(counts).cumsum(0).to("cuda", torch.int32)
    expert_S = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).cuda()
    expected = (weight_EOD.double()[expert_S] @ x_SD.double().unsqueeze(-1)).squeeze(-1)
    along = torch.randn(expected.shape, generator=draw, device="cuda").to(dtype)
    wanted = torch.autograd.grad((expected * along.double()).sum(), [x_SD, weight_EOD])
    torch.empty(1 << 26, device="cuda").fill_(torch.nan)  # whatever is not written to shows
    result = grouped_product(x_SD, weight_EOD, ends_E)
    found = torch.autograd.grad((result * along).sum(), [x_SD, weight_EOD])
    for ours, theirs in zip((result, *found), (expected, *wanted), strict=True):
        assert (ours - theirs).norm() < (1e-2 if dtype == torch.bfloat16 else 1e-5) * theirs.norm()
    idle = torch.tensor(counts) == 0
    assert not found[1][idle.cuda()].any()


def test_kernels_of_experts_equal_their_definition():
    expert_kernels_cases.main("cuda")


def train_on_cuda(rank: int, world: int, scenario: Scenario, path: str) -> cases.Outcome:
    return cases.run_scenario(replace(scenario, device=f"cuda:{rank}"), path)


def outcome_of(path: str, world: int = 1, keys: tuple[str, ...] = ()) -> cases.Outcome:
    return run_workers(
        train_on_cuda,
        world,
        Scenario("", world, overrides=keys),
        path,
        deadline_s=120,
        backend="cpu:gloo,cuda:nccl",
    )[0]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_experts_in_fp32_train_as_in_plain_hf(model_dirs, model, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    ours, theirs = outcome_of(model_dirs[model], world), reference_on_disk(model_dirs[model], model)
    assert (ours.log_prob - theirs.log_prob).abs().max() < 1e-4
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-3)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        assert (ours.weights[name] - weight).abs().mean() < 0.01 * cases.LR, name
    record_outcome(case_of(model, on_cuda(Scenario("", world))), ours, theirs)


@pytest.mark.parametrize("model", MODELS)
def test_experts_in_bf16_stay_near_fp32(model_dirs, model):
    ours, theirs = outcome_of(model_dirs[model], 1, BF16), reference_on_disk(model_dirs[model], model)
    assert (ours.log_prob - theirs.log_prob).abs().mean() < 0.05
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=0.1)
    record_outcome(case_of(model, on_cuda(Scenario("", 1)), dtype="bfloat16"), ours, theirs)


@pytest.mark.timeout(450)
def test_the_main_job_trains_experts_that_vllm_samples_from(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    shape = {"tie": False, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "init_std": 0.1}
    make_tiny_model_dir(inputs.model, "qwen3_moe", experts=8, vocab=128, dtype="bfloat16", **shape)
    rollout = "actor_rollout_ref.rollout."
    keys = {
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": min(2, torch.cuda.device_count()),
        "trainer.deadline_s": 240,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "bfloat16",
        f"{rollout}name": "vllm",
        f"{rollout}dtype": "bfloat16",
        f"{rollout}enforce_eager": True,
        **VLLM_SHARE,
        f"{rollout}max_num_seqs": 64,
    }
    words = overrides(inputs, tmp_path / "out", *(f"{key}={value}" for key, value in keys.items()))
    env = dict(os.environ)
    env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "siirl.main_dag", *words], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    lines = Finished.read(tmp_path / "out").lines
    diffs = [
        value for line in lines for name, value in line.items() if name.endswith("rollout_log_prob_diff")
    ]
    print(f"\ndistances of log-probs: {diffs}")
    assert len(diffs) == 3 and max(diffs) < 0.05
    ran = on_cuda(Scenario("", keys["trainer.n_gpus_per_node"]))
    record(case_of("qwen3_moe", ran, "job with vLLM, mean", "bfloat16"), max(diffs))
