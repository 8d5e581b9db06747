"""Each template learns the quickstart task on CPU: validation reward above 0.8."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "quickstart" / "algorithm.sh"
NAMES = re.findall(r"^  ([^ *]+)\) ", SCRIPT.read_text(), re.M)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "QUICKSTART_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, timeout=870, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_the_template_learns_the_quickstart_task(tmp_path, name):
    run(tmp_path, sys.executable, "examples/quickstart/prepare.py", "--out", str(tmp_path)).check_returncode()
    done = run(tmp_path, "bash", str(SCRIPT), name, "trainer.total_training_steps=60", "trainer.save_freq=-1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    rewards = [line["val/reward/mean"] for line in lines if "val/reward/mean" in line]
    assert rewards[-1] > 0.8, rewards


def test_other_names_are_refused_with_the_known_ones(tmp_path):
    assert set(NAMES) == {"grpo", "ppo", "dapo", "gspo", "rloo", "reinforce++", "remax"}
    refused = run(tmp_path, "bash", str(SCRIPT), "grop")
    assert refused.returncode == 2 and all(name in refused.stderr for name in NAMES)
