"""The benchmark of what kills cost, shrunken: its numbers add up, and its run ends as an undisturbed one."""

import json
import subprocess
import sys

import pytest
from job_harness import ROOT

SHRUNKEN = {"--steps": "6", "--step-s": "3", "--kills": "0.34", "--seed": "4"}
"""The kills fall at 24% of step 2 and 51% of step 3: each may be late by half a step, with steps after it."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_run_whose_processes_are_killed_loses_restarts_and_one_step_each(tmp_path):
    out = tmp_path / "ettr.json"
    shrunken = [word for option in SHRUNKEN.items() for word in option]
    command = [sys.executable, str(ROOT / "benchmarks" / "ettr.py"), *shrunken, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["weights_equal"] and report["metrics_equal"]
    assert [line["step"] for line in report["steps"]] == [1, 2, 3, 4, 5, 6]
    assert all(line["step_s"] >= 3 for line in report["steps"])
    assert [kill["step"] for kill in report["kills"]] == [2, 3] and len(report["restart_s"]) == 2
    longest_s = max(line["step_s"] for line in report["steps"])
    for kill in report["kills"]:
        kept = [int(word) for word in kill["went_on_from"].split()[0].split("_")[2:]]
        assert kill["step"] <= max([0, *kept]) + 1, "at most one step is lost, however late the kill was"
        assert 0 < kill["noticed_s"] < kill["restart_s"] and 0 <= kill["lost_s"] < 2 * longest_s + 1
    assert 0 < report["ettr_of_the_command"] < report["ettr"] < 1
    spent_s = report["useful_s"] + report["restarts_s"] + report["lost_s"] + report["saves_and_reports_s"]
    assert spent_s == pytest.approx(report["total_s"], abs=0.1) and report["saves_and_reports_s"] >= 0
