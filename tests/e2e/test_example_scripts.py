"""Every launch script of examples/ runs: its own command line, a small model of its family, CPU processes.

The scripts of its folders run whole, until their agents have learnt, in test_agents_elsewhere.py,
test_templates_learn.py, test_team_examples_learn.py and test_multi_agent_learns.py.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures_tiny import make_arithmetic_parquet, make_tiny_model_dir
from job_harness import REWARD, ROOT
from launch_jobs import environment

EXAMPLES = ROOT / "examples"
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
MEGATRON = f"{ACTOR}.megatron"
SMALL = {
    "data.train_batch_size": 8,
    "data.max_prompt_length": 32,
    "data.max_response_length": 8,
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ROLLOUT}.n": 2,
    f"{ROLLOUT}.max_num_seqs": 16,
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.logger": "[]",
    "trainer.total_training_steps": 2,
    "trainer.deadline_s": 400,
    "trainer.max_restarts": 0,
}
"""What makes any script small; its other keys are its own."""
LENGTHS = {f"{ROLLOUT}.prompt_length": 32, f"{ROLLOUT}.response_length": 8}


@dataclass(frozen=True)
class Case:
    """A launch script, shrunken. nodes: the machines that it is asked for; ranks: the processes that run.

    keys: what differs from SMALL and from the script. layers: of the model, 2 where its sizes allow.
    """

    script: str
    family: str
    ranks: int
    keys: tuple[str, ...] = ()
    nodes: int = 1
    layers: int = 2


CASES = [
    Case("run_qwen3-30b-a3b-megatron.sh", "qwen3_moe", 4, (
        f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
        f"{MEGATRON}.expert_model_parallel_size=2",
        f"{REF}.megatron.expert_model_parallel_size=2",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ), nodes=4, layers=4),
    Case("run_qwen3-235b-a22b-megatron.sh", "qwen3_moe", 4, (
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        f"{MEGATRON}.expert_model_parallel_size=2",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ), nodes=32),
    Case("run_llama3.1-405b-megatron.sh", "llama", 4, (
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        f"{MEGATRON}.context_parallel_size=1",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ), nodes=32, layers=6),
    Case("run_llama3.1-70b-megatron.sh", "llama", 4, (
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ), nodes=2),
    Case("run_llama3.1-70b-megatron.sh", "llama", 4, (
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.pipeline_model_parallel_size=1",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ), nodes=8),
    Case("run_qwen2.5-7b-grpo.sh", "qwen2", 2),
    Case("run_qwen3-0.6b-1gpu.sh", "qwen3", 1),
    Case("run_qwen3-8b-grpo.sh", "qwen3", 2),
    Case("run_qwen3-8b-grpo-multinode.sh", "qwen3", 4, (f"{ACTOR}.fsdp_config.fsdp_size=2",), nodes=2),
    Case("run_qwen3-8b-grpo-lag.sh", "qwen3", 2),
    Case("run_qwen3-8b-megatron.sh", "qwen3", 4, (
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    )),
    Case("run_qwen3-8b-ppo-megatron.sh", "qwen3", 4, (
        "critic.megatron.tensor_model_parallel_size=2",
        "trainer.critic_warmup=1",
    )),
]  # fmt: skip


def settings_of(case: Case, folder: Path) -> list[str]:
    """The key=value settings that a script would start its run with."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    known = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHON": str(python), "DRY_RUN": "1"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / case.script)],
        env=known | {"PET_NNODES": str(case.nodes), "OUTPUT_DIR": str(folder / "out")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("-m\nsiirl.cli\ncheck\n--elsewhere\n")
    return done.stdout.splitlines()[4:]


def run(command: list[str], folder: Path, **variables: str) -> list[dict]:
    """A user's command to its end; the lines of its metrics."""
    env = environment() | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    (metrics,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def trained(lines: list[dict], steps: int) -> None:
    """Every optimizer step of a run was taken: gradients were finite, and not zero in all of them."""
    norms = [line[name] for line in lines for name in line if name.endswith("grad_norm")]
    assert lines[-1]["step"] == steps and norms and max(norms) > 0
    assert all(not value for line in lines for name, value in line.items() if name.endswith("skipped_step"))


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", CASES, ids=[f"{case.script}-{case.nodes}" for case in CASES])
def test_a_launch_script_trains_a_small_model_of_its_family(tmp_path, case):
    # heads and each of two ranks' share of an expert are 32 wide, as vLLM's kernels on the CPU want
    sizes = {"hidden": 128, "mlp": 128, "heads": 4, "kv_heads": 4, "head_dim": 32}
    sizes |= {"layers": case.layers, "tie": False}
    model = make_tiny_model_dir(tmp_path / "model", case.family, init_std=0.2, **sizes)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    script = settings_of(case, tmp_path)
    given = {setting.partition("=")[0] for setting in script}
    small = SMALL | {key: value for key, value in LENGTHS.items() if key in given}
    inputs = {
        "data.train_files": make_arithmetic_parquet(tmp_path / "train.parquet", 32),
        "data.val_files": make_arithmetic_parquet(tmp_path / "test.parquet", 4, seed=1),
        "actor_rollout_ref.model.path": model,
        "custom_reward_function.path": reward,
        "trainer.n_gpus_per_node": case.ranks,
    }
    shrunk = [f"{key}={value}" for key, value in (small | inputs).items()]
    command = [sys.executable, "-m", "siirl.main_dag", *script, *shrunk, *case.keys]
    lines = run(command, tmp_path / "out")
    trained(lines, 2)
    assert "rollout.name=vllm" in " ".join(script)
    assert (tmp_path / "out" / "hf_model" / "config.json").is_file()


def test_every_launch_script_is_in_the_table():
    assert {case.script for case in CASES} == {path.name for path in EXAMPLES.glob("run_*.sh")}
