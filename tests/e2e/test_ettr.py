"""The benchmark of what kills cost, shrunken: its numbers add up, and its run ends as an undisturbed one."""

import json
import subprocess
import sys

import pytest
from job_harness import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_run_whose_processes_are_killed_loses_restarts_and_one_step_each(tmp_path):
    out = tmp_path / "ettr.json"
    shrunken = ["--steps", "6", "--step-s", "2", "--kills", "0.34", "--out", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "ettr.py"), *shrunken]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["weights_equal"] and report["metrics_equal"]
    assert [line["step"] for line in report["steps"]] == [1, 2, 3, 4, 5, 6]
    assert all(line["step_s"] >= 2 for line in report["steps"])
    assert len(report["kills"]) == len(report["restart_s"]) == 2
    for kill in report["kills"]:
        assert kill["step"] in (
            1,
            *(int(word) + 1 for word in kill["went_on_from"].split()[0].split("_")[2:]),
        )
        assert 0 < kill["noticed_s"] < kill["restart_s"] < 60 and 0 <= kill["lost_s"] < 2 * 4
    assert 0 < report["ettr_of_the_command"] < report["ettr"] < 1
    spent_s = report["useful_s"] + report["restarts_s"] + report["lost_s"] + report["saves_and_reports_s"]
    assert spent_s == pytest.approx(report["total_s"], abs=0.1) and report["saves_and_reports_s"] >= 0
