"""Benchmarks that are cut in their work, by SIGTERM as `timeout` sends it: what was counted is there."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from job_harness import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SPEED = ("backends_gpu.py", "speed", "--shape", "tiny", "--steps", "400", "--warm-up", "1", "--runs", "fsdp")
LINK = ("weight_link.py", "--mib", "16", "--syncs", "100000", "--sources", "1", "--targets", "1")


@pytest.mark.parametrize(
    ("words", "out", "file", "counted"),
    [
        (SPEED, "", "speed_tiny_1_tp1.json", ["fsdp"]),
        (LINK, "link.json", "link.json", ["headers", "shards", "wire"]),
    ],
    ids=["a job of siirl", "ranks of its own"],
)
def test_a_benchmark_that_is_cut_tells_what_it_has_counted(words, out, file, counted, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:], "--out", str(tmp_path / out)]
    run = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        until = time.monotonic() + 300
        while not (tmp_path / file).exists():
            assert run.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        below = psutil.Process(run.pid).children(recursive=True)
        assert below
        run.terminate()
        assert run.wait(60) == 128 + 15
    finally:
        run.kill()
    assert psutil.wait_procs(below, timeout=15)[1] == []
    report = json.loads((tmp_path / file).read_text())
    assert report["complete"] is False and list(report["counted_steps"]) == counted
    for name, steps in report["counted_steps"].items():
        assert 0 < steps < report["asked_steps"][name]
        told = (
            report["runs"][name]["time/step_s"]["all"]
            if "runs" in report
            else report["ways"][name]["seconds"]
        )
        assert len(told) == steps
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []
