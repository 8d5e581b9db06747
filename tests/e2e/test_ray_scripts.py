"""A launch script on two machines, both of them this one: one starts Ray, the other joins, the job runs."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from job_harness import Inputs, overrides
from launch_jobs import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = ROOT / "examples" / "run_qwen3-0.6b-1gpu.sh"


def free_port() -> str:
    with socket.create_server(("", 0)) as server:
        return str(server.getsockname()[1])


def start(env: dict[str, str], rank: int, arguments: list[str], log: Path) -> subprocess.Popen:
    with log.open("wb") as output:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env=env | {"PET_NODE_RANK": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def test_two_machines_run_a_script_and_end_together(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    own = {"PET_NNODES": "2", "MASTER_ADDR": "localhost", "RAY_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    env = environment() | own | {"PYTHON": sys.executable, "NODE_WAIT_S": "200"}
    settings = ["trainer.nnodes=2", "trainer.total_training_steps=1", "trainer.val_before_train=False"]
    arguments = overrides(inputs, tmp_path / "out", *settings)
    logs = [tmp_path / f"machine_{rank}.log" for rank in range(2)]
    worker = start(env, 1, arguments, logs[1])
    head = start(env, 0, arguments, logs[0])
    try:
        assert head.wait(300) == 0, logs[0].read_text()
        assert worker.wait(60) == 0, logs[1].read_text()
    finally:
        head.kill()
        worker.kill()
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 1
    assert (tmp_path / "out" / "logs" / "rank_1.log").is_file()
    assert "has ended" in logs[1].read_text()
