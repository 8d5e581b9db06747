"""The main job with vLLM rollouts on the CPU: they sample what the trainer's weights say, step after step."""

import os
import random
import signal
import threading
import time

import psutil
import pytest
import torch
from dist_harness import WorkerFailure
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job
from transformers import AutoConfig

VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "trainer.deadline_s=240",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    # vLLM's CPU attention has no smaller heads. Large weights: the model says again what it has said.
    make_tiny_model_dir(made.model, init_std=0.5, head_dim=32)
    return made


def two_steps(inputs, folder, *keys):
    """The job whose responses are long enough that tokens follow one another again."""
    more = ("disable_log_stats=False", *keys)
    settings = [*VLLM, *(f"actor_rollout_ref.rollout.{key}" for key in more)]
    settings += ["data.max_response_length=24", "trainer.total_training_steps=2"]
    return run_job(1, overrides(inputs, folder / "out", *settings), deadline_s=280)


@pytest.fixture(scope="module")
def plain(inputs, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIIRL_LOGGING_FILENAME", "run.log")
        return two_steps(inputs, tmp_path_factory.mktemp("plain"))


@pytest.mark.timeout(300)
def test_log_probs_of_vllm_are_the_trainers_after_every_sync(plain):
    differences = plain.values("actor/rollout_log_prob_diff")
    assert len(differences) == 2 and max(differences) < 1e-5
    norms = plain.values("actor/grad_norm")
    assert len(norms) == 2 and norms[0] != norms[1]
    assert all(count > 0 for count in plain.values("weight_sync/bytes"))
    assert len(plain.values("val/reward/mean")) == 1
    assert plain.values("rollout/vllm_preemptions_total") == [0.0, 0.0]
    log = plain.output / "logs" / "vllm_agent_0.rollout_rank_0.log"
    assert log.exists()
    assert f"its output is in {log}" in (plain.output / "logs" / "run.log").read_text()


def losing(output, ends):
    """Signal the engines of a run once it has trained a step; again when there is another one. ends: how."""
    lost = []

    def engines():
        """Those that have read their messages: they have started."""
        return [
            child
            for child in psutil.Process().children(recursive=True)
            if "siirl.engines.rollout.served.server" in " ".join(child.cmdline()) and child.pid not in lost
        ]

    def watch():
        metrics, log = output / "metrics.jsonl", output / "logs" / "run.log"
        for number, end in enumerate(ends):
            while not (metrics.exists() and metrics.read_text().count("\n") >= 2 + number):
                time.sleep(0.05)
            while log.read_text().count("back after") < number:
                time.sleep(0.05)
            time.sleep(random.uniform(0, 0.5))
            for child in engines():
                os.kill(child.pid, end)
                lost.append(child.pid)

    threading.Thread(target=watch, daemon=True).start()
    return lost


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_engine_is_killed_and_stopped_trains_what_it_would_have(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("SIIRL_LOGGING_FILENAME", "run.log")
    restarts = "actor_rollout_ref.rollout.max_engine_restarts=2"
    settings = (*VLLM, restarts, "trainer.total_training_steps=12", "trainer.test_freq=4")
    whole = run_job(1, overrides(inputs, tmp_path / "whole", *settings), deadline_s=200)
    lost = losing(tmp_path / "out", [signal.SIGKILL, signal.SIGSTOP])
    run = run_job(1, overrides(inputs, tmp_path / "out", *settings), deadline_s=300)
    assert len(lost) == 2 and sum(run.values("rollout/engine_restarts")) == 2
    assert sum(whole.values("rollout/engine_restarts")) == 0
    for name in ("actor/rollout_log_prob_diff", "actor/grad_norm", "reward/score", "val/reward/mean"):
        assert run.values(name) == whole.values(name), name
    ours, theirs = run.weights(), whole.weights()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    said = (tmp_path / "out" / "logs" / "run.log").read_text()
    assert "killed by SIGKILL" in said and "no heartbeat in 20 s" in said and said.count("back after") == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_that_dies_too_often_ends_the_run_with_its_name(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("SIIRL_LOGGING_FILENAME", "run.log")
    restarts = "actor_rollout_ref.rollout.max_engine_restarts"
    arguments = overrides(
        inputs, tmp_path / "out", *VLLM, "trainer.total_training_steps=100000", f"{restarts}=1"
    )
    lost = losing(tmp_path / "out", [signal.SIGKILL, signal.SIGKILL])
    with pytest.raises(WorkerFailure) as caught:
        run_job(1, arguments, deadline_s=350)
    log = tmp_path / "out" / "logs" / "vllm_agent_0.rollout_rank_0.log"
    words = (
        "agent_0.rollout",
        "killed by SIGKILL",
        "started again 1 times within an hour",
        str(log),
        f"{restarts}=1",
    )
    assert len(lost) == 2 and all(word in str(caught.value) for word in words)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_whose_config_is_overridden_is_the_same_in_trainer_engine_and_export(inputs, tmp_path):
    """One layer of two, and other rotary embeddings: vLLM kept those of the files, and so did the export."""
    said = "{num_hidden_layers: 1, rope_theta: 100.0, rope_scaling: {rope_type: linear, factor: 2.0}}"
    more = (f"actor_rollout_ref.model.override_config={said}", "trainer.total_training_steps=2")
    run = run_job(1, overrides(inputs, tmp_path / "out", *VLLM, *more), deadline_s=280)
    assert max(run.values("actor/rollout_log_prob_diff_max")) < 1e-4
    exported = AutoConfig.from_pretrained(tmp_path / "out" / "hf_model")
    assert exported.num_hidden_layers == len(exported.layer_types) == 1
    assert exported.rope_parameters == {"rope_theta": 100.0, "rope_type": "linear", "factor": 2.0}
