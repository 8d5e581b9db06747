"""What a benchmark has counted is on disk when it is cut, and no process of it is left."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
report_file = importlib.import_module("report_file")

ON_CPU = {"grpo_cpu", "grpo_cpu_trl", "lag_curves", "observing", "rewards", "scale"}
"""Benchmarks that no GPU runs."""
JOB = """
import json, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(folder / "below").write_text(str(below.pid))
with (folder / "metrics.jsonl").open("a", buffering=1) as file:
    for step in range(1, 4):
        print(json.dumps({"step": step, "time/step_s": step}), file=file)
    file.write('{"step": 4, "time')
    time.sleep(600)
"""
BENCHMARK = """
import sys
from pathlib import Path
from report_file import Report, end_by_signals, following, run_job
end_by_signals()
folder = Path(sys.argv[1])
report = Report(folder / "report.json", {"first": 5, "second": 5}, rows=[])
def counted(rows):
    report["rows"] = rows
    report.count("first", len(rows))
run_job([sys.executable, sys.argv[2], str(folder)], following(folder / "metrics.jsonl", counted))
report.finish()
"""


def wait_for(what, seconds: float = 20.0):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_cut_leaves_its_steps_and_no_process(tmp_path, number):
    (tmp_path / "job.py").write_text(JOB)
    words = [sys.executable, "-c", BENCHMARK, str(tmp_path), str(tmp_path / "job.py")]
    run = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(BENCHMARKS)})
    try:
        wait_for((tmp_path / "report.json").exists)
        below = psutil.Process(int((tmp_path / "below").read_text()))
        (job,) = psutil.Process(run.pid).children()
        run.send_signal(number)
        run.send_signal(number)  # as timeout does: to the process, and to its group
        assert run.wait(20) == 128 + number
    finally:
        run.kill()
    assert not below.is_running() and not job.is_running()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] is False
    assert report["asked_steps"] == {"first": 5, "second": 5}
    assert report["counted_steps"] == {"first": 3, "second": 0}
    assert [row["step"] for row in report["rows"]] == [1, 2, 3], "the line that is half written is left out"
    assert sorted(path.name for path in tmp_path.glob(".*")) == [], "no part of a file is left"


def test_a_report_is_complete_when_all_is_counted_that_was_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py", "--out", "/a/place/out.json", "a.b=c/d"])
    monkeypatch.setenv("SIIRL_COMMIT", "1a2b3c")
    report = report_file.Report(tmp_path / "new" / "report.json", {1: 2, 3: 1}, keys=["a"])
    assert not report.path.exists(), "an older file stays until there is something to tell"
    report.count(1, 2)
    report.finish()
    assert json.loads(report.path.read_text())["complete"] is False
    report.count(3, 1)
    report.finish()
    told = json.loads(report.path.read_text())
    assert told["complete"] is True and told["keys"] == ["a"]
    assert told["commit"] == "1a2b3c" and told["host"]["cores"] > 0 and told["host"]["cpu"]
    assert told["command"] == "benchmarks/some.py --out out.json a.b=c/d", "no place of this machine"


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    report = report_file.Report(tmp_path / "report.json", {"a": 1})
    report.count("a", 1)
    before = report.path.read_text()
    report["odd"] = object()
    with pytest.raises(TypeError):
        report.save()
    assert report.path.read_text() == before and len(list(tmp_path.iterdir())) == 1


def test_every_benchmark_of_a_gpu_tells_as_it_counts():
    tells = {path.stem for path in BENCHMARKS.glob("*.py") if "def main()" in path.read_text()}
    tells -= ON_CPU | {"fit_costs", "beside_verl"}  # which read what others have told
    assert len(tells) > 10
    for name in tells:
        source = (BENCHMARKS / f"{name}.py").read_text()
        assert "end_by_signals()" in source and re.search("import (Report|Rows)", source), name
        assert ".write_text(json.dumps(report" not in source, name


def test_curves_that_were_cut_are_compared_as_far_as_both_go():
    curves = importlib.import_module("backend_curves")
    runs = {"fsdp": {"actor/loss": [1.0, 2.0, 3.0]}, "megatron": {"actor/loss": [1.5, 2.1]}}
    assert curves.overlap(runs)["actor/loss"] == {"megatron_to_fsdp": 0.5, "fsdp_bf16_to_fp32": None}
