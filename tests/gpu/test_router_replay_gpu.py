"""vLLM on GPUs says which experts computed each token: with them trainer and rollout come closer (R3)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from gpu_share import IN_WORDS
from job_harness import ROOT, Finished, Inputs, overrides
from proven_models import record
from recorded_cases import case_of, on_cuda
from train_engine_cases import Scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
R3 = f"{ACTOR}.router_replay.mode=R3"
SHAPE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp": 64, "init_std": 0.2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    make_tiny_model_dir(made.model, "qwen3_moe", tie=False, experts=32, vocab=128, dtype="bfloat16", **SHAPE)
    return made


ACCEPTED = (
    "from siirl.compiler.backends import ROLLOUT_BACKENDS; import siirl.main_dag, sys; "
    "type(ROLLOUT_BACKENDS['vllm']).no_experts = lambda self, cfg: ''; sys.exit(siirl.main_dag.main())"
)
"""A job of which nothing refuses engines of several GPUs that say experts: until they were seen to."""


def run(inputs: Inputs, output: Path, *more: str, gpus: int = 1) -> Finished:
    """Two steps of the job, all in bfloat16."""
    arguments = overrides(
        inputs,
        output,
        *("trainer.device=cuda", f"trainer.n_gpus_per_node={gpus}", "trainer.total_training_steps=2"),
        f"{ROLLOUT}.tensor_model_parallel_size={gpus}",
        *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.deadline_s=200"),
        *(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bfloat16", f"{ACTOR}.optim.lr=1e-4"),
        *(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bfloat16", *IN_WORDS),
        *(f"{ROLLOUT}.max_num_seqs=64", "data.max_response_length=64"),
        *more,
    )
    done = subprocess.run(
        [sys.executable, "-c", ACCEPTED, *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return Finished.read(output)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("gpus", [1, 2])
def test_trainer_and_vllm_are_closer_by_the_same_experts(inputs, tmp_path, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    eager = f"{ROLLOUT}.enforce_eager=true"
    runs = {"disabled": (eager,), "R3": (eager, R3), "R3 by CUDA graphs": (R3,)}
    mean, largest = {}, {}
    for name, keys in runs.items():
        finished = run(inputs, tmp_path / name.replace(" ", "_"), *keys, gpus=gpus)
        mean[name] = finished.values("actor/rollout_log_prob_diff")
        largest[name] = finished.values("actor/rollout_log_prob_diff_max")
        print(f"{name}: mean {mean[name]}, largest {largest[name]}")
        assert len(mean[name]) == 2 and min(finished.values("actor/grad_norm")) > 0
    for name in ("R3", "R3 by CUDA graphs"):
        assert max(mean[name]) < min(mean["disabled"]) / 1.5
        assert max(largest[name]) < min(largest["disabled"]) / 2
    ran = on_cuda(Scenario("", gpus))
    record(case_of("qwen3_moe", ran, "job with vLLM, R3, mean", "bfloat16"), max(mean["R3"]))
