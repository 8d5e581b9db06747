"""The main job with vLLM rollouts on the CPU: they sample what the trainer's weights say, step after step."""

import os
import signal
import threading
import time

import psutil
import pytest
from dist_harness import WorkerFailure
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job

VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "trainer.deadline_s=240",
)


@pytest.fixture
def inputs(tmp_path):
    made = Inputs.make(tmp_path / "inputs")
    make_tiny_model_dir(made.model, init_std=0.2, head_dim=32)  # vLLM's CPU attention has no smaller heads
    return made


@pytest.mark.timeout(300)
def test_log_probs_of_vllm_are_the_trainers_after_every_sync(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("SIIRL_LOGGING_FILENAME", "run.log")
    more = ("actor_rollout_ref.rollout.disable_log_stats=False", "trainer.total_training_steps=2")
    run = run_job(1, overrides(inputs, tmp_path / "out", *VLLM, *more), deadline_s=280)
    differences = run.values("actor/rollout_log_prob_diff")
    assert len(differences) == 2 and max(differences) < 1e-5
    norms = run.values("actor/grad_norm")
    assert len(norms) == 2 and norms[0] != norms[1]
    assert all(count > 0 for count in run.values("weight_sync/bytes"))
    assert len(run.values("val/reward/mean")) == 1
    assert run.values("rollout/vllm_preemptions_total") == [0.0, 0.0]
    log = tmp_path / "out" / "logs" / "vllm_agent_0.rollout_rank_0.log"
    assert log.exists()
    assert f"its output is in {log}" in (tmp_path / "out" / "logs" / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_that_dies_ends_the_run_with_its_name(inputs, tmp_path):
    ends = []

    def kill_once_it_trains() -> None:
        metrics = tmp_path / "out" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.2)
        for child in psutil.Process().children(recursive=True):
            if "siirl.engines.rollout.vllm.server" in " ".join(child.cmdline()):
                os.kill(child.pid, signal.SIGKILL)
                ends.append(time.monotonic())

    watcher = threading.Thread(target=kill_once_it_trains, daemon=True)
    watcher.start()
    arguments = overrides(inputs, tmp_path / "out", *VLLM, "trainer.total_training_steps=100000")
    with pytest.raises(WorkerFailure) as caught:
        run_job(1, arguments, deadline_s=350)
    assert "agent_0.rollout" in str(caught.value) and "killed by SIGKILL" in str(caught.value)
    assert ends and time.monotonic() - ends[0] < 30
