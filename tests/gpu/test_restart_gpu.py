"""A worker of a run on two GPUs, FSDP2 and vLLM, is killed twice: it ends as an undisturbed one does."""

import json
import sys
from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from gpu_share import VLLM_SHARE
from job_harness import Finished, Inputs, overrides
from killed_jobs import run_and_kill
from safetensors.torch import load_file

from siirl.runs.run_state import read_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(590),
]
SHAPE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "init_std": 0.1}
RUNS = {"killed": ([3, 6], [1]), "undisturbed": ([], []), "again": ([], [])}
"""Name -> steps after which ranks are killed, and which."""
MOST_RESTART_S = 60.0
"""From a kill until all ranks work again, each with a new engine."""


def test_two_kills_leave_the_weights_as_they_were(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    make_tiny_model_dir(inputs.model, vocab=128, dtype="bfloat16", **SHAPE)
    restarts_s: list[float] = []
    weights = {name: finish(inputs, tmp_path / name, *kills, restarts_s) for name, kills in RUNS.items()}
    begin = {name: tensor.float() for name, tensor in load_file(inputs.model / "model.safetensors").items()}
    moved = distance(weights["undisturbed"], begin)
    away = {name: distance(weights[name], weights["undisturbed"]) / moved for name in ("killed", "again")}
    attempts = read_run(tmp_path / "killed" / "out").attempts
    lines = (tmp_path / "killed" / "out" / "metrics.jsonl").read_text().splitlines()
    print(f"\nof the way that training went ({moved:.3g}): {away}\nattempts: {attempts}")
    print(f"seconds from a kill to the first instruction of the last rank: {restarts_s}")
    assert [attempt.cause for attempt in attempts] == ["killed by SIGKILL"] * 2
    assert all(attempt.next.endswith(" in memory") for attempt in attempts)
    assert [json.loads(line)["step"] for line in lines] == list(range(9)), "each step once"
    assert len(restarts_s) == 2 and max(restarts_s) <= MOST_RESTART_S, restarts_s
    assert away["killed"] <= 2 * away["again"] + 0.01


def finish(
    inputs: Inputs, folder: Path, at_steps: list[int], victims: list[int], restarts_s: list[float]
) -> dict[str, torch.Tensor]:
    """The exported weights of a run of eight steps; restarts_s gets what its restarts took."""
    folder.mkdir()
    keys = {
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": 8,
        "trainer.memory_checkpoint_freq": 1,
        "trainer.deadline_s": 240,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.dtype": "bfloat16",
        "actor_rollout_ref.rollout.enforce_eager": True,
        **VLLM_SHARE,
        "actor_rollout_ref.rollout.max_num_seqs": 64,
    }
    words = overrides(inputs, folder / "out", *(f"{key}={value}" for key, value in keys.items()))
    command = [sys.executable, "-m", "siirl.main_dag", *words]
    code, console = run_and_kill(command, folder, at_steps, victims, patience_s=400, restarts_s=restarts_s)
    print(console[-3000:])
    assert code == 0, console[-6000:]
    return {name: tensor.float() for name, tensor in Finished.read(folder / "out").weights().items()}


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return sum(float((ours[name] - theirs[name]).pow(2).sum()) for name in theirs) ** 0.5
