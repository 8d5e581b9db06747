"""The example script and the notebook of examples/python plan, check and train."""

import json
import re
import subprocess
import sys

import pytest
from job_harness import ROOT
from launch_jobs import environment

PYTHON = ROOT / "examples" / "python"
pytestmark = pytest.mark.timeout(400)


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_script_plans_checks_and_trains(tmp_path):
    out = run(str(PYTHON / "train.py"), "--out", str(tmp_path), "--steps", "2")
    assert re.fullmatch(rf"reward \S+ -> \S+; everything is in {tmp_path}", out.splitlines()[-1])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2
    assert (tmp_path / "plan.svg").exists() and (tmp_path / "hf_model").is_dir()


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_one_after_the_other(tmp_path):
    notebook = json.loads((PYTHON / "quickstart.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    place, steps = 'OUT = ROOT / "outputs" / "notebook"', "STEPS = 100"
    assert place in cells[0] and steps in cells[0]
    cells[0] = cells[0].replace(place, f"OUT = Path({str(tmp_path)!r})").replace(steps, "STEPS = 2")
    shown = [index for index, cell in enumerate(cells) if cell.startswith("siirl.plan")]
    assert len(shown) == 1
    cells[shown[0]] = f"shown = {cells[shown[0]]}._repr_html_()\nassert '<svg' in shown"
    (tmp_path / "cells.py").write_text("\n\n".join(cells))
    out = run(str(tmp_path / "cells.py"))
    assert f"everything is in {tmp_path}" in out.splitlines()[-1]
    assert (tmp_path / "hf_model").is_dir()
