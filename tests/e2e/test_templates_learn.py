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


def learn(folder: Path, *words: str) -> list[dict[str, float]]:
    """The metrics of 60 steps by the script, after a look at whether the task was learned."""
    run(folder, sys.executable, "examples/quickstart/prepare.py", "--out", str(folder)).check_returncode()
    done = run(folder, "bash", str(SCRIPT), *words, "trainer.total_training_steps=60", "trainer.save_freq=-1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["val/reward/mean"] for line in lines if "val/reward/mean" in line]
    assert rewards[0] < 0.5 < 0.8 < rewards[-1], rewards
    return lines


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_the_template_learns_the_quickstart_task(tmp_path, name):
    learn(tmp_path, name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_template_with_a_lag_learns_it_from_rows_of_this_step_and_the_one_before(tmp_path):
    """All responses end together here, so that every second step trains what the one before has sampled."""
    lines = learn(tmp_path, "grpo", "dag.workflow_path=dag_templates/grpo_lag.yaml")
    for name in ("rollout/staleness", "rollout/token_staleness"):
        assert [line[name] for line in lines if name in line] == [0.0, 1.0] * 30, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_engines_own_log_probs_in_place_of_old_ones_learn_it_too(tmp_path):
    """Of two optimizer steps a step: the ratio to the engine corrects for what it samples otherwise."""
    actor = "actor_rollout_ref.actor"
    keys = (f"{actor}.recompute_old_log_prob=False", f"{actor}.ppo_mini_batch_size=16")
    lines = learn(tmp_path, "grpo", *keys)
    distances = [
        line["actor/rollout_log_prob_diff"] for line in lines if "actor/rollout_log_prob_diff" in line
    ]
    assert len(distances) == 60 and max(distances) < 1e-4


def test_other_names_are_refused_with_the_known_ones(tmp_path):
    assert set(NAMES) == {"grpo", "ppo", "dapo", "gspo", "rloo", "reinforce++", "remax"}
    refused = run(tmp_path, "bash", str(SCRIPT), "grop")
    assert refused.returncode == 2 and all(name in refused.stderr for name in NAMES)
