"""A vLLM engine on the CPU leaves nothing on the machine, however it ends."""

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from later import needed

from siirl.config import load_config
from siirl.data.completions import Request, SamplingParams
from siirl.engines.rollout.served.engine_process import EngineLost, EngineProcess
from siirl.engines.rollout.served.messages import Start, Submit
from siirl.engines.rollout.vllm.arguments import engine_arguments, engine_environment
from siirl.model_files.hf_config import load_hf_config

needed("vllm")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model_dir(path, vocab=24, init_std=0.3, head_dim=32, max_positions=256, tokenizer=False)


def shared_memory(pid):
    """Paths below /dev/shm that a process and its children have mapped; one without a name is "(deleted)"."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    lines = [line for one in processes for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines()]
    return {line.split(maxsplit=5)[-1] for line in lines if re.search("/dev/shm/(psm_|vllm_dist_)", line)}


def start(model_dir, ranks, log_path):
    """An engine, on the CPU."""
    cfg = load_config(
        [
            "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.rollout.max_model_len=256",
        ]
    )
    cpu = torch.device("cpu")
    arguments = engine_arguments(cfg, str(model_dir), load_hf_config(cfg.actor_rollout_ref.model), ranks, cpu)
    process = EngineProcess("engine", engine_environment(ranks, cpu, []), log_path, 500.0)
    process.ask(Start("siirl.engines.rollout.vllm.native", arguments))
    return process


def await_end(processes):
    _, left = psutil.wait_procs(processes, timeout=20)
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


ENDS = [
    pytest.param(1, "close", marks=pytest.mark.slow),
    pytest.param(2, "close", marks=pytest.mark.slow),
    (2, "kill"),
]


@pytest.mark.parametrize(("ranks", "end"), ENDS)
def test_an_engine_leaves_no_file_no_socket_and_no_shared_memory(
    ranks, end, model_dir, tmp_path, public_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(public_path))
    monkeypatch.setenv("TMPDIR", str(public_path))
    process = start(model_dir, ranks, tmp_path / "vllm.log")
    mapped = shared_memory(process.pid)
    assert all("(deleted)" in path for path in mapped) and bool(mapped) == (ranks > 1)
    parts = process.call("read_tensor", name="model.norm.weight")
    assert len(parts) == ranks, "its processes talk"
    below = psutil.Process(process.pid).children(recursive=True)
    if end == "kill":
        os.kill(process.pid, signal.SIGKILL)
        process.kill()
    else:
        process.close()
    await_end(below)
    until_s = time.monotonic() + 20
    while left := [path for path in public_path.iterdir() if "torchinductor" not in path.name]:
        assert time.monotonic() < until_s, left
        time.sleep(0.1)


def answers_of(process):
    """What it says to a request."""
    process.expect()
    process.send(Submit([Request("s_0", [5, 6, 7], SamplingParams(max_tokens=4), 0)], None))
    while not (found := process.listen(1.0)):
        pass
    return found[0].answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"), [("Worker_TP1", "SIGKILL"), ("Worker_TP1", "SIGSTOP"), ("EngineCore", "SIGKILL")]
)
def test_an_engine_of_two_ranks_that_loses_a_process_says_which(name, how, model_dir, tmp_path):
    process = start(model_dir, 2, tmp_path / "vllm.log")
    below = psutil.Process(process.pid).children(recursive=True)
    (victim,) = (one for one in below if "".join(one.cmdline()).strip() == f"VLLM::{name}")
    try:
        assert len(answers_of(process)) == 1
        began_s = time.monotonic()
        victim.send_signal(signal.Signals[how])
        done = {"SIGKILL": "killed by signal", "SIGSTOP": "stopped by signal"}[how]
        with pytest.raises(EngineLost, match=rf"its process VLLM::{name} \(pid {victim.pid}\) is .*: {done}"):
            answers_of(process)
        assert time.monotonic() - began_s < 30
    finally:
        process.kill()
    await_end(below)
