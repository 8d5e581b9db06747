"""Recipes of tinker-cookbook, unmodified, on a server of ours: each by the command of its example."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = Path(sys.prefix) / "tinker" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not CLIENT.exists(), reason="tinker-cookbook is not there: make .venv/.tinker"),
]
SAME = 0.06
"""Of mean rewards of ten steps of 256 responses that are right nine times of ten: three standard errors are
0.02, and two runs differ by their seeds, too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("serve")


def ran(folder: Path, name: str) -> list[dict]:
    """The metrics of a recipe, or of the job."""
    variables = {"SERVE_DIR": str(folder), "PYTHON": sys.executable, "CLIENT": str(CLIENT)}
    words = ["bash", str(ROOT / "examples" / "serve" / "run.sh"), name]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def values(metrics: list[dict], name: str) -> list[float]:
    return [line[name] for line in metrics if name in line]


def test_supervised_learns_and_what_it_saved_teaches_by_distillation(folder):
    losses = values(ran(folder, "supervised"), "train_mean_nll")
    assert losses[-1] < losses[0] - 1
    divergence = values(ran(folder, "distillation"), "teacher_kl")
    assert min(divergence) > 0.001, "the teacher is another one than the student"


def test_preference_prefers_what_was_chosen(folder):
    losses = values(ran(folder, "preference"), "dpo_loss")
    assert losses[0] == pytest.approx(0.693, abs=0.01) and losses[-1] < losses[0]


def test_two_players_of_one_model_play_and_train(folder):
    metrics = ran(folder, "multi_agent")
    assert max(values(metrics, "env/all/total_turns")) > 0


def test_a_recipe_of_rl_reaches_the_reward_of_the_same_job_without_a_server(folder):
    rewards = values(ran(folder, "rl"), "env/all/reward/total")
    alone = values(ran(folder, "job"), "reward/serve/larger/mean")
    assert len(rewards) == len(alone) == 40
    served, own = sum(rewards[-10:]) / 10, sum(alone[-10:]) / 10
    assert served > rewards[0] + 0.2 and abs(served - own) < SAME, (served, own)
